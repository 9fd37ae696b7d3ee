"""Trainings: experiment files and their errors, resumed runs, and predicted steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from experiments import __main__ as cli
from experiments.cluster import launch
from experiments.report import folders, jsonl
from experiments.training.experiment import Experiment
from experiments.training.report import predicted, records
from experiments.training.run import prepare
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
    ids = [run.id for run in good.runs()]
    assert ids[:4] == ["digits.none.0", "digits.topk.0", "digits.a-b.0", "digits.none.1"], "labels stay in the folder"
    assert len(ids) == len(set(ids)) == 12
    assert good.tasks[1].learning_rate == 0.001  # YAML 1.1 reads 1e-3 as text
    good.save(tmp_path / "config.yaml")
    assert [run.spec() for run in Experiment.open(tmp_path / "config.yaml").runs()] == [r.spec() for r in good.runs()]


def test_options_of_the_command_override_the_experiment(good):
    runs = good.override(ranks=4, steps=7, methods=["topk"], tasks=["bytes"]).runs()
    assert [(run.id, run.task.steps, run.ranks) for run in runs] == [("bytes.topk.0", 7, 4), ("bytes.topk.1", 7, 4)]
    with pytest.raises(ValueError, match=r"no method 'tok' \(did you mean 'topk'\?\); it has: none, topk, a/\.\./b"):
        good.override(methods=["tok"])


@pytest.mark.parametrize("file", sorted((ROOT / "configs" / "experiments").glob("*.yaml")), ids=lambda f: f.stem)
def test_the_packaged_experiments(file):
    assert Experiment.open(file).runs()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("method: topk", "method: tokp", "line 3: methods.1.method: unknown method 'tokp' (did you mean 'topk'?)"),
        ("density: 0.01", "density: 1.5", "line 3: methods.1.density"),
        ("task: digits", "task: digit", "line 2: tasks.0.task: unknown task 'digit' (did you mean 'digits'?)"),
        ("task: digits", "task: digits, net: lenet", "line 2: tasks.0.net: no net 'lenet' learns 'digits'"),
        ("task: digits", "task: digits, net: byte_lstm", "these do: digits_net"),
        ("task: digits", "task: digits, clip: before", "line 2: tasks.0.clip: must be after"),
    ],
)
def test_a_wrong_experiment_starts_no_ranks(config, monkeypatch, old, new, words):
    monkeypatch.setattr(launch, "Ranks", lambda *_: pytest.fail("ranks were started"))
    config.write_text(SMALL_EXPERIMENT.replace(old, new), encoding="utf-8")
    result = CliRunner().invoke(cli.app, ["run", str(config)])
    assert result.exit_code == 2 and words in result.output and "Traceback" not in result.output
    assert not Path("runs").exists()


def test_a_resumed_run_keeps_only_what_is_finished(config, tmp_path):
    experiment, folder = Experiment.open(config), tmp_path / "out"
    prepare(folder, experiment, "ddp", "here")
    for run, end in zip(experiment.runs(), ("finished", "failed"), strict=True):
        start = {"event": "start", "spec": run.spec(), "launch": {"driver": "ddp", "link": "here"}}
        jsonl.append(folder / "metrics" / f"{run.id}.jsonl", start)
        jsonl.append(folder / "metrics" / f"{run.id}.jsonl", {"event": end})
    prepare(folder, experiment, "ddp", "here")
    assert [file.name for file in (folder / "metrics").iterdir()] == ["digits.none.0.jsonl"]
    with pytest.raises(ValueError, match=r"other settings, \{'task': .*'steps': 20"):
        prepare(folder, experiment.override(steps=30), "ddp", "here")


def test_every_run_gets_a_new_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("x", "x-2", "x-10", "xy"):
        Path("runs", name).mkdir(parents=True)
    assert folders.choose("x") == Path("runs/x-11")
    assert folders.choose("x", resume=True) == Path("runs/x-10")
    with pytest.raises(ValueError, match="nothing to resume"):
        folders.choose("z", resume=True)


def test_a_folder_without_a_training_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no training"):
        records([tmp_path])


def test_a_predicted_step_is_computing_codec_and_transfer():
    assert predicted(0.008, 0.002, 4000, "100mbit") == pytest.approx(0.01 + 8 * 4000 * (1 + HEADERS) / 1e8)
