"""Experiment files: what they resolve to, and that every complaint names the file, the line and the key."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvdcompress.lab.training import launch
from hvdcompress.lab.training.experiment import Experiment
from hvdcompress.plan import PlanError

ROOT = Path(__file__).resolve().parents[2]
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


def test_a_file_without_a_name_is_called_after_itself(write):
    assert Experiment.open(write(GOOD.replace("name: small\n", ""))).name == "experiment"


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("method: topk\n", "method: topkk\n", 9, "methods.1.method: unknown method 'topkk' (did you mean 'topk'?)"),
        ("  - none\n", "  - nine\n", 8, "did you mean 'none'?"),
        ("density: 0.01\n", "density: 2\n", 10, "methods.1.density: topk: density = 2"),
        ("density: 0.01\n", "densty: 0.01\n", 10, "(did you mean 'density'?)"),
        ("{steps: 5}", "{stepz: 5}", 11, "(did you mean 'steps'?)"),
        ("steps: 10", "stepz: 10", 6, "tasks.1.stepz: unknown key (did you mean 'steps'?)"),
        ("steps: 10", "steps: 0", 6, "tasks.1.steps: 0:"),
        ("steps: 10", "steps: true", 6, "tasks.1.steps: True:"),
        ("1e-3", "fast", 6, "tasks.1.learning_rate: 'fast':"),
        ("1e-3", "yes", 6, "tasks.1.learning_rate: True:"),
        ("1e-3", "1e-3, clip: never", 6, "tasks.1.clip: 'never':"),
        ("name: small", "nam: small", 1, "nam: unknown key (did you mean 'name'?)"),
        ("name: small", "name: ../small", 1, "name: '../small':"),
        ("ranks: 2", "ranks: 0", 2, "ranks: 0:"),
        ("seeds: [0, 1]", "seeds: [1, 1]", 3, "seeds"),
        ("seeds: [0, 1]", "seeds: []", 3, "seeds"),
        ("label: few", "label: topk", 12, "'topk' is there twice"),
        ("ranks: 2", "name: twice", 2, "repeated"),
    ],
)
def test_complaints_name_file_line_and_key(write, old, new, line, words):
    assert old in GOOD
    with pytest.raises(PlanError, match=re.escape(words)) as caught:
        Experiment.open(write(GOOD.replace(old, new, 1)))
    assert f"experiment.yaml, line {line}: " in str(caught.value)


def test_a_missing_key_is_named(write):
    with pytest.raises(PlanError, match="methods: is missing"):
        Experiment.open(write("tasks: [digits]\n"))


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


def test_clipping_before_the_exchange_is_part_of_what_a_result_depends_on(write):
    entry = "  - {label: before, method: topk, density: 0.01, train: {clip: before, clip_norm: 0.5}}\n"
    *_, before = Experiment.open(write(GOOD + entry)).runs()
    assert (before.task.clip, before.task.clip_norm) == ("before", 0.5)
    assert before.spec()["task"]["clip"] == "before"
    assert {run.task.clip for run in Experiment.open(write(GOOD)).runs()} == {"after"}


@pytest.mark.parametrize("bound", [0.1, 100.0])
def test_the_loss_is_scaled_so_that_the_ranks_own_gradient_is_clipped(bound):
    torch, train_torch = pytest.importorskip("torch"), pytest.importorskip("hvdcompress.lab.training.train_torch")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 1))
    trainer, x = SimpleNamespace(model=model, task=SimpleNamespace(clip="before", clip_norm=bound)), torch.randn(16, 20)

    def loss():
        return model(x).square().mean()

    model.zero_grad()
    loss().backward()
    assert (0.1 < torch.nn.utils.clip_grad_norm_(model.parameters(), bound) < 100).all()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    now = loss()
    factor = train_torch.Trainer.clipping(trainer, now)
    assert all(p.grad is None for p in model.parameters()), "hooks would have fired"
    (now * factor).backward()
    for p, wanted in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, wanted, rtol=1e-5, atol=1e-8)
    trainer.task.clip = "after"
    assert train_torch.Trainer.clipping(trainer, now) == 1.0


def test_the_framework_is_part_of_what_a_result_depends_on(write, tmp_path):
    experiment = Experiment.open(write("framework: tensorflow\n" + GOOD))
    assert all(run.spec()["framework"] == "tensorflow" for run in experiment.runs())
    experiment.save(tmp_path / "config.yaml")
    assert Experiment.open(tmp_path / "config.yaml").framework == "tensorflow"
    torch = Experiment.open(write(GOOD))
    assert torch.framework == "torch" and "framework" not in torch.runs()[0].spec()
    with pytest.raises(PlanError, match="line 1.*framework.*'jax'"):
        Experiment.open(write("framework: jax\n" + GOOD))
    with pytest.raises(PlanError, match="tasks.1.*'bytes' has no net for framework 'tensorflow'"):
        launch.check_tasks(experiment)
