"""Trainings: experiment files and their errors, resumed runs, and predicted steps."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from experiments import __main__ as cli
from experiments.cluster import launch
from experiments.report import results
from experiments.training.experiment import Experiment
from experiments.training.report import FIGURES, predicted, publish
from hvdcompress.cli.numbers import HEADERS
from tests import ROOT, SMALL_EXPERIMENT

GOOD = """\
name: small
ranks: 2
seeds: [0, 1]
tasks:
  - digits
  - {task: bytes, steps: 10, learning_rate: 1e-3}
methods:
  - none
  - method: topk
    density: 0.01
    warmup: {steps: 5}
  - {label: a/../b, method: topk, density: 0.001, min_elements: 64}
"""


@pytest.fixture
def good(tmp_path):
    file = tmp_path / "experiment.yaml"
    file.write_text(GOOD, encoding="utf-8")
    return Experiment.open(file)


def test_an_experiment_is_a_run_per_task_seed_and_method(good, tmp_path):
    runs = good.runs()
    assert [(task.label, method.label, seed) for task, method, seed in runs[2:4]] == [
        ("digits", "a/../b", 0),
        ("digits", "none", 1),
    ]
    assert len(runs) == 12 and good.tasks[1].learning_rate == 0.001  # YAML 1.1 reads 1e-3 as text
    good.save(tmp_path / "config.yaml")
    assert Experiment.open(tmp_path / "config.yaml").runs() == runs


def test_options_of_the_command_override_the_experiment(good):
    changed = good.override(ranks=4, steps=7, methods=["topk"], tasks=["bytes"])
    assert changed.ranks == 4
    assert [(task.label, task.steps, seed) for task, _, seed in changed.runs()] == [("bytes", 7, 0), ("bytes", 7, 1)]
    with pytest.raises(ValueError, match=r"no method 'tok' \(did you mean 'topk'\?\); it has: none, topk, a/\.\./b"):
        good.override(methods=["tok"])


@pytest.mark.parametrize("file", sorted((ROOT / "configs" / "experiments").glob("*.yaml")), ids=lambda f: f.stem)
def test_the_packaged_experiments(file):
    assert Experiment.open(file).runs()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("method: topk", "method: tokp", "line 3: methods.1: method: unknown method 'tokp' (did you mean 'topk'?)"),
        ("density: 0.01", "density: 1.5", "line 3: methods.1: density"),
        ("task: digits", "task: digit", "unknown task 'digit' (did you mean 'digits'?)"),
        ("task: digits", "task: digits, net: lenet", "no net 'lenet' learns 'digits'"),
        ("task: digits", "task: digits, net: byte_lstm", "these do: digits_net"),
        ("task: digits", "task: digits, clip: before", "digits: clip must be after"),
    ],
)
def test_a_wrong_experiment_starts_no_ranks(config, monkeypatch, old, new, words):
    monkeypatch.setattr(launch, "Ranks", lambda *_: pytest.fail("ranks were started"))
    config.write_text(SMALL_EXPERIMENT.replace(old, new), encoding="utf-8")
    result = CliRunner().invoke(cli.app, ["run", str(config)])
    assert result.exit_code == 2 and words in result.output and "Traceback" not in result.output
    assert not Path("runs").exists()


def test_a_training_that_diverges_has_a_record(config, tmp_path, capsys):
    """``publish`` names it below the table, and counts it in its row."""
    experiment = Experiment.open(config)
    figures = dict.fromkeys(FIGURES, 1.0)
    good = {"task": "digits", "method": "none", "seed": 0, "parameters": 5, "scores": [(20, 9.0)], "score": 9.0}
    bad = {"task": "digits", "method": "topk", "seed": 0, "parameters": 5, "scores": [], "error": "the loss is nan"}
    publish(experiment, pd.DataFrame([{**good, "loss": 1.0, **figures}, bad]), "here", tmp_path)
    printed = capsys.readouterr().out
    assert "- digits, topk: the loss is nan" in printed and "topk (1 of 1 diverged)" in printed
    assert (tmp_path / "scores.svg").exists() and list(results.load("records", tmp_path).score.notna()) == [True, False]


def test_a_predicted_step_is_computing_codec_and_transfer():
    assert predicted(0.008, 0.002, 4000, "100mbit") == pytest.approx(0.01 + 8 * 4000 * (1 + HEADERS) / 1e8)
