"""`python -m experiments compare`: errors and bytes of methods on saved gradients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from typer.testing import CliRunner

from experiments import compare
from experiments.__main__ import app
from experiments.configfile import MethodEntry
from hvdcompress.testing import numbers

SHAPES = {"conv": (8, 4, 3, 3), "fc": (40, 50)}


def gradients(steps: int = 5, ranks: int = 2) -> compare.Gradients:
    return [
        [{name: numbers(shape, rank, step) for name, shape in SHAPES.items()} for rank in range(ranks)]
        for step in range(steps)
    ]


def measured(method: str, **settings: object) -> compare.Outcome:
    return compare.measure(MethodEntry(label=method, method=method, min_elements=1, **settings), gradients())


def test_errors_are_those_that_their_definition_says() -> None:
    """Random-k of half of the elements: what is left out of one exchange is the error of that exchange."""
    outcome = measured("randomk", density=0.5)
    assert outcome.one_exchange is not None
    assert 0.6 < outcome.one_exchange.low <= outcome.one_exchange.median <= outcome.one_exchange.high < 0.8  # sqrt(1/2)
    assert outcome.whole_run is not None and outcome.whole_run < outcome.one_exchange.median  # feedback makes up for it
    lost = measured("randomk", density=0.5, feedback="none")
    assert lost.whole_run is not None and lost.whole_run > outcome.whole_run


def test_one_odd_step_does_not_decide() -> None:
    """A last step that nothing can go wrong with: what is reported is the median of all, and the late phase's own."""
    given = gradients(9)
    for one in given[-1]:
        for name, array in one.items():
            sparse = np.zeros_like(array)
            sparse.flat[0] = 1.0
            one[name] = sparse
    outcome = compare.measure(MethodEntry(label="t", method="topk", min_elements=1, density=0.1, values="fp16"), given)
    assert outcome.one_exchange is not None and outcome.errors[-1] == 0 and outcome.one_exchange.median > 0.3
    found = outcome.by_phase
    assert found["early"] is not None and found["early"].median == np.median(outcome.errors[:3])
    assert found["late"] is not None and found["late"].median == np.median(outcome.errors[6:])
    assert outcome.one_exchange == tuple(np.percentile(outcome.errors, (50, 25, 75)))


def test_the_command_prints_and_writes_a_table(tmp_path: Path) -> None:
    file, table = tmp_path / "g.safetensors", tmp_path / "t.md"
    compare.save(file, gradients(2))
    done = CliRunner().invoke(app, ["compare", str(file), "--methods", "none,topk", "--out", str(table)])
    assert done.exit_code == 0 and "topk" in done.output
    assert table.read_text().count("\n") == 4 and "| topk density=0.01 |" in table.read_text()
    vanishing = gradients(6)
    for ranks in vanishing[4:]:
        for one in ranks:
            one["fc"], one["conv"] = one["fc"] * 0.01, one["conv"] * 0.01
    compare.save(file, vanishing)
    warned = CliRunner().invoke(app, ["compare", str(file), "--methods", "none", "--out", str(table)])
    assert warned.exit_code == 0 and "warning: the norm of the mean gradient collapses" in warned.stderr
    assert "Warning: the norm" in table.read_text()
    bad = CliRunner().invoke(app, ["compare", str(file), "--methods", "topkk"])
    assert bad.exit_code == 2 and "did you mean" in bad.output + (bad.stderr or "")
