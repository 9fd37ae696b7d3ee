"""tools/soak.py: what it takes for growth, and the page that is made of its figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soak

from tests import ROOT

WELL = {
    "method": "topk", "steps": 10_000, "equal": True, "slope": 3.0, "error": 1.0, "residual": 10.0,
    "residual_late": 10.0, "residual_slope": 1e-9, "residual_error": 1e-9, "own_slope": 0.0, "first": 1e-3,
    "last": 1e-3, "command": "python tools/soak.py",
}  # fmt: skip
ILL = {
    "ranks differ": {"equal": False},
    "memory grows": {"slope": 200.0},
    "the residual grows": {"residual_slope": 1e-3},
    "steps become slower": {"last": 2e-3},
}


def test_what_is_as_it_should_be() -> None:
    assert soak.wrong(WELL) == ""


@pytest.mark.parametrize("what", ILL)
def test_what_is_wrong_is_named(what: str) -> None:
    assert soak.wrong({**WELL, **ILL[what]}) == what
    assert what in soak.table([{**WELL, **ILL[what]}]).markdown()


def test_a_slope_that_is_within_its_error_is_no_growth() -> None:
    assert soak.wrong({**WELL, "slope": 200.0, "error": 80.0}) == ""


def test_the_line_is_that_of_least_squares() -> None:
    x = np.arange(50.0)
    y = 3 * x + np.random.default_rng(0).normal(size=50)
    (slope, _), covariance = np.polyfit(x, y, 1, cov=True)
    assert soak.line(x, y) == pytest.approx((slope, np.sqrt(covariance[0, 0])))


def test_a_few_steps_of_a_method() -> None:
    """Residuals that ranks keep of PowerSGD grow, what is still to come does not: by Alg. 2 they differ."""
    found: dict[str, Any] = soak.soak("powersgd", 900)
    assert found["equal"] and found["own_slope"] > 0.1 > 20 * abs(found["residual_slope"])


def test_the_page_has_what_was_found(tmp_path: Path) -> None:
    torture = tmp_path / "torture"
    torture.mkdir()
    fault = {"fault": "nan", "door": "mpi", "outcome": "hang", "seconds": 15.0, "why": "w", "command": "again"}
    fuzz = {"command": "fuzz", "mutations": 5, "decoders": 2, "outcomes": 3, "corpus": 4, "seconds": 1, "grown": 10}
    (torture / "results.jsonl").write_text(json.dumps(fault) + "\n")
    (tmp_path / "fuzz.jsonl").write_text(json.dumps({**fuzz, "faults": 0}) + "\n")
    (tmp_path / "soak.jsonl").write_text(json.dumps(WELL) + "\n")
    copy = tmp_path / "project"
    (copy / "docs").mkdir(parents=True)
    (copy / "docs" / "reliability_notes.md").write_text("The notes.\n")
    (copy / "tools").mkdir()
    for name in ("soak.py", "write_reliability.py"):
        (copy / "tools" / name).write_text((ROOT / "tools" / name).read_text())
    given = [torture, tmp_path / "fuzz.jsonl", tmp_path / "soak.jsonl"]
    line = [sys.executable, "tools/write_reliability.py", *map(str, given)]
    subprocess.run(line, cwd=copy, check=True, timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT)})
    page = (copy / "docs" / "reliability.md").read_text()
    for words in (
        "The notes.",
        "1 faults, 1 bugs",
        "again",
        "| `fuzz` |",
        "python tools/soak.py\n",
        "| topk | 10000 |",
    ):
        assert words in page, words
