"""Tests of ``arithmetic.py`` in the backends; ``test_ops.py`` compares its ops with the reference."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from hvdcompress.ops.vectors import Sparse
from tests.unit.ops.calls import overlapping
from tests.unit.ops.comparing import Put
from tests.unit.ops.inputs import vector


@pytest.mark.parametrize(
    "op,counts",
    [("write", [5, 3, 1]), ("merge", [50, 50])],  # write: only index 2 comes from three ranks
)
def test_torch_adds_no_index_twice_in_one_call(monkeypatch: pytest.MonkeyPatch, op: str, counts: list[int]) -> None:
    """A device would add equal indices in any order, or lose one of them."""
    torch, ops = pytest.importorskip("torch"), importlib.import_module("hvdcompress.ops.torch")
    calls, add = [], ops.arithmetic._add_at

    def watch(out: Any, index: Any, values: Any) -> None:
        assert len(index.unique()) == len(index)
        calls.append(len(index))
        add(out, index, values)

    monkeypatch.setattr("hvdcompress.ops.torch.arithmetic._add_at", watch)
    if op == "write":
        index = torch.tensor([0, 2, 5, 5, 5, 2, 5, 7, 0, 1, 2, 2])
        ops.write(torch.ones(8), Sparse(index, torch.tensor([1.0, 2, 3, 0, 0, 4, 5, 6, 7, 8, 9, 0])), 1.0)
    else:
        ops.merge(*overlapping(Put(ops), vector("normal", 50), vector("normal", 50), 2), 100)
    assert calls == counts
