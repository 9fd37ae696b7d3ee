"""``python -m experiments compare``: errors and bytes of methods on saved gradients."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from experiments import compare
from experiments.__main__ import app
from experiments.configfile import MethodEntry
from experiments.training.gradients import save
from hvdcompress.testing import numbers

SHAPES = {"conv": (8, 4, 3, 3), "fc": (40, 50)}


def gradients(steps: int = 5, ranks: int = 2) -> compare.Gradients:
    return [
        [{name: numbers(shape, rank, step) for name, shape in SHAPES.items()} for rank in range(ranks)]
        for step in range(steps)
    ]


def measured(method: str, **settings: object) -> dict[str, Any]:
    return compare.measure(MethodEntry(label=method, method=method, min_elements=1, **settings), gradients())


def test_errors_are_those_of_their_definition() -> None:
    """Random-k of half of the elements: what is left out of one exchange is the error of that exchange."""
    row = measured("randomk", density=0.5)
    assert 0.6 < row["low"] <= row["one_exchange"] <= row["high"] < 0.8  # sqrt(1/2)
    assert row["cosine"] == pytest.approx((1 - row["one_exchange"] ** 2) ** 0.5, abs=0.01)
    assert row["whole_run"] < row["one_exchange"], "feedback makes up for it"
    assert measured("randomk", density=0.5, feedback="none")["whole_run"] > row["whole_run"]
    dense = measured("none")
    assert dense["one_exchange"] < 1e-6 and dense["ratio"] == 1 and dense["steps"] == 5


def test_one_odd_step_does_not_decide() -> None:
    """A last step that nothing can go wrong with: what is reported is the median of all, and that of each third."""
    given = gradients(9)
    for one in given[-1]:
        for name, array in one.items():
            one[name] = np.zeros_like(array)
            one[name].flat[0] = 1.0
    row = compare.measure(MethodEntry(label="t", method="topk", min_elements=1, density=0.1, values="fp16"), given)
    assert row["one_exchange"] > 0.3 and row["late"] > 0.3 and row["steps"] == 9


def test_the_command_prints_and_writes(tmp_path: Path) -> None:
    file = tmp_path / "g.safetensors"
    save(file, gradients(2))
    words = ["compare", str(file), "--out", str(tmp_path)]
    done = CliRunner().invoke(app, [*words, "--methods", "none,topk"])
    assert done.exit_code == 0 and "topk" in done.output
    rows = json.loads((tmp_path / "one-exchange.json").read_text())["records"]
    assert [row["method"] for row in rows] == ["none", "topk"] and rows[1]["ratio"] > 5
    vanishing = gradients(6)
    for ranks in vanishing[4:]:
        for one in ranks:
            one["fc"], one["conv"] = one["fc"] * 0.01, one["conv"] * 0.01
    save(file, vanishing)
    warned = CliRunner().invoke(app, [*words, "--methods", "none"])
    assert warned.exit_code == 0 and re.search(r"mean gradient: early \S+, middle \S+, late 0\.\d+\n", warned.output)
    bad = CliRunner().invoke(app, [*words, "--methods", "topkk"])
    assert bad.exit_code == 2 and "did you mean" in bad.output + (bad.stderr or "")
