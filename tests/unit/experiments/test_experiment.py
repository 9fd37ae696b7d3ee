"""Experiment files: what they resolve to, and that every complaint names the file, the line and the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.training.experiment import Experiment
from tests import ROOT

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
  - {label: few, method: topk, density: 0.001, min_elements: 64}
"""


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> Path:
        file = tmp_path / "experiment.yaml"
        file.write_text(text, encoding="utf-8")
        return file

    return write


def test_resolves_to_task_by_seed_by_method(write):
    experiment = Experiment.open(write(GOOD))
    ids = [run.id for run in experiment.runs()]
    assert ids[:4] == ["digits.none.0", "digits.topk.0", "digits.few.0", "digits.none.1"]
    assert len(ids) == len(set(ids)) == 12
    assert experiment.tasks[1].learning_rate == 0.001  # YAML 1.1 reads 1e-3 as text
    assert [method.density for method in experiment.methods] == [None, 0.01, 0.001]
    assert experiment.methods[2].settings == {"method": "topk", "density": 0.001, "min_elements": 64}
    assert experiment.methods[2].plan.min_elements == 64


def test_saved_experiment_is_the_same(write, tmp_path):
    experiment = Experiment.open(write(GOOD))
    experiment.save(tmp_path / "config.yaml")
    again = Experiment.open(tmp_path / "config.yaml")
    assert [run.spec() for run in again.runs()] == [run.spec() for run in experiment.runs()]
    assert again.name == "small"


@pytest.mark.parametrize("file", sorted((ROOT / "configs" / "experiments").glob("*.yaml")), ids=lambda f: f.stem)
def test_the_projects_own_experiments_are_good(file):
    assert Experiment.open(file).runs()


def test_the_command_line_overrides(write):
    experiment = Experiment.open(write(GOOD)).override(ranks=4, steps=7, methods=["few"], tasks=["bytes"])
    assert [(run.id, run.task.steps, run.ranks) for run in experiment.runs()] == [
        ("bytes.few.0", 7, 4),
        ("bytes.few.1", 7, 4),
    ]
    with pytest.raises(ValueError, match="no method 'fw' \\(did you mean 'few'\\?\\); it has: none, topk, few"):
        Experiment.open(write(GOOD)).override(methods=["fw"])


def test_a_label_never_leaves_its_folder(write):
    run = Experiment.open(write(GOOD.replace("label: few", "label: a/../b"))).runs()[2]
    assert run.method.label == "a/../b" and "/" not in run.id and ".." not in run.id
