"""``experiments compare``: errors and bytes of methods on saved gradients."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from experiments import compare
from experiments.__main__ import app
from experiments.configfile import MethodEntry
from experiments.training.gradients import save
from hvdcompress.testing import numbers

SHAPES = {"conv": (8, 4, 3, 3), "fc": (40, 50)}


def gradients(steps=5):
    return [[{n: numbers(s, rank, step) for n, s in SHAPES.items()} for rank in (0, 1)] for step in range(steps)]


def measured(method, given, **settings):
    return compare.measure(MethodEntry(label=method, method=method, min_elements=1, **settings), given)


def test_errors_are_those_of_their_definition():
    row = measured("randomk", gradients(), density=0.5)
    assert 0.6 < row["one_exchange"] < 0.8  # half of the elements are left out: sqrt(1/2)
    assert row["cosine"] == pytest.approx((1 - row["one_exchange"] ** 2) ** 0.5, abs=0.01)
    without = measured("randomk", gradients(), density=0.5, feedback="none")
    assert row["whole_run"] < min(row["one_exchange"], without["whole_run"]), "feedback makes up for it"
    dense = measured("none", gradients())
    assert dense["one_exchange"] < 1e-6 and dense["ratio"] == 1 and dense["steps"] == 5


def test_the_command_prints_and_writes(tmp_path):
    save(tmp_path / "g.safetensors", gradients(2))
    words = ["compare", str(tmp_path / "g.safetensors"), "--out", str(tmp_path), "--methods"]
    done = CliRunner().invoke(app, [*words, "none,topk"])
    assert done.exit_code == 0 and "topk" in done.output
    rows = json.loads((tmp_path / "one-exchange.json").read_text())["records"]
    assert [row["method"] for row in rows] == ["none", "topk"] and rows[1]["ratio"] > 5
    bad = CliRunner().invoke(app, [*words, "topkk"])
    assert bad.exit_code == 2 and "did you mean" in bad.output
