"""What other libraries offer: each of their methods has a plan here that loads, or a reason."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from hvdcompress.plan.reading import plan_of

sys.path.append(str(Path(__file__).parents[3] / "docs"))
peers = import_module("peers").peers()
ROWS = [(peer["peer"], row) for peer in peers for row in peer["methods"]]


@pytest.mark.parametrize(("peer", "row"), ROWS, ids=lambda one: one if isinstance(one, str) else one["theirs"])
def test_a_method_has_a_plan_or_a_reason(peer: str, row: dict[str, Any]) -> None:
    assert len(row.keys() & {"plan", "python", "missing"}) == 1 and row["theirs"] and row["file"]
    if "plan" in row:
        plan_of(row["plan"])
    if "python" in row:
        module, _, name = row["python"].rpartition(".")
        assert callable(getattr(import_module(module), name))


def test_the_libraries_are_those_of_the_page() -> None:
    names = {"GRACE", "BytePS", "PyTorch DDP", "DeepSpeed", "torchft", "Hivemind", "ColossalAI"}
    assert {peer["peer"] for peer in peers} == names and all(peer["read"] for peer in peers)
