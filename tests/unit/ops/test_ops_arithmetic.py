"""Tests of ``arithmetic.py`` in the backends; ``test_ops.py`` compares its ops with the reference."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from hvdcompress.ops.vectors import Sparse


def test_torch_adds_no_index_twice_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device would add equal indices in any order, or lose one of them."""
    torch, ops = pytest.importorskip("torch"), importlib.import_module("hvdcompress.ops.torch").ops
    calls, add = [], ops._add_at

    def watch(out: Any, index: Any, values: Any) -> None:
        assert len(index.unique()) == len(index)
        calls.append(len(index))
        add(out, index, values)

    monkeypatch.setattr(ops, "_add_at", watch, raising=False)
    index = torch.tensor([0, 2, 5, 5, 5, 2, 5, 7, 0, 1, 2, 2])
    ops.write(torch.ones(8), Sparse(index, torch.tensor([1.0, 2, 3, 0, 0, 4, 5, 6, 7, 8, 9, 0])), 1.0)
    assert calls == [5, 3, 1]  # only index 2 comes from three ranks
