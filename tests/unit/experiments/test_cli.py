"""The command: what it refuses before anything starts, and where it writes."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from experiments import __main__ as cli
from experiments import doctor
from experiments.cluster import launcher
from experiments.output import folder as folders
from experiments.training import launch
from experiments.training.experiment import Experiment
from tests import SMALL_EXPERIMENT


def invoke(*words):
    return CliRunner().invoke(cli.app, [str(word) for word in words], env={"COLUMNS": "200"})


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("method: topk", "method: tokp", "line 3: methods.1.method: unknown method 'tokp' (did you mean 'topk'?)"),
        ("density: 0.01", "density: 1.5", "line 3: methods.1.density"),
        ("task: digits", "task: digit", "line 2: tasks.0.task: unknown task 'digit' (did you mean 'digits'?)"),
        ("task: digits", "task: cifar10", "line 2: tasks.0.path: is missing: the task 'cifar10' reads your own data"),
        ("task: digits", "task: images, path: /no/where", "line 2: tasks.0.path: no such folder: /no/where"),
        (
            "task: digits",
            "task: digits, net: lenet",
            "line 2: tasks.0.net: unknown net 'lenet' (did you mean 'lenet5'?)",
        ),
    ],
)
def test_a_bad_experiment_starts_nothing(config, monkeypatch, old, new, words):
    monkeypatch.setattr(launcher, "Ranks", lambda *_: pytest.fail("ranks were started"))
    config.write_text(SMALL_EXPERIMENT.replace(old, new), encoding="utf-8")
    result = invoke("run", config)
    assert result.exit_code == 2 and words in result.output and "Traceback" not in result.output
    assert not Path("runs").exists()


# -- where results go ----------------------------------------------------------------------------


def finished(folder, config, steps=20):
    folder.mkdir(parents=True)
    experiment = Experiment.open(config)
    launch.prepare(folder, experiment, resume=False)
    for run in experiment.runs():
        file = folder / "metrics" / f"{run.id}.jsonl"
        end = "finished" if run.method.label == "none" else "failed"
        file.write_text("\n".join(json.dumps(e) for e in ({"event": "start", "spec": run.spec()}, {"event": end})))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_is_written_under_sudo_is_the_users(tmp_path, monkeypatch):
    monkeypatch.setenv("SUDO_GID", "4321")
    monkeypatch.chdir(tmp_path)
    shared = tmp_path / "roots"
    shared.mkdir()
    (shared / "secret").touch()
    for user, folder in ((0, Path("runs/first")), (4321, Path("deep/runs/second")), (4321, Path("roots/third"))):
        monkeypatch.setenv("SUDO_UID", str(user)) if user else monkeypatch.delenv("SUDO_UID", raising=False)
        with pytest.raises(KeyboardInterrupt), folders.users_own(folder):
            (folder / "metrics").mkdir(parents=True)
            (folder / "metrics" / "a.jsonl").touch()
            (folder / "out").symlink_to(shared)
            (folder / "hard").hardlink_to(shared / "secret")
            raise KeyboardInterrupt
        assert {path.lstat().st_uid for path in (folder, folder / "metrics", folder / "metrics" / "a.jsonl")} == {user}
    assert Path("deep").stat().st_uid == 4321, "made on the way"
    assert {path.stat().st_uid for path in (tmp_path, tmp_path / "runs", shared, shared / "secret")} == {0}


def test_resuming_keeps_what_is_finished_and_only_that(config, tmp_path):
    folder = tmp_path / "runs" / "small"
    finished(folder, config)
    launch.prepare(folder, Experiment.open(config), resume=True)
    assert [file.name for file in (folder / "metrics").iterdir()] == ["digits.none.0.jsonl"]
    with pytest.raises(ValueError, match=r"other settings \(task.steps: 20 there, 30 now\)"):
        launch.prepare(folder, Experiment.open(config).override(steps=30), resume=True)
    launch.prepare(folder, Experiment.open(config), resume=False)
    assert not list((folder / "metrics").iterdir())


# -- the line that is run, its environment and its log -------------------------------------------


def test_the_environment_of_ranks(monkeypatch):
    monkeypatch.setattr(launcher.os, "cpu_count", lambda: 8)
    few, many = launcher.environment(2), launcher.environment(9)
    assert few["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    assert few["OMP_NUM_THREADS"] == "1" and int(few["HOROVOD_CACHE_CAPACITY"]) > 1024
    assert "OMPI_MCA_mpi_yield_when_idle" not in few and many["OMPI_MCA_mpi_yield_when_idle"] == "1"


# -- doctor --------------------------------------------------------------------------------------


def test_doctor_tells_absent_from_broken(monkeypatch, tmp_path):
    (tmp_path / "cracked.py").write_text("raise ImportError('libmpi.so is missing')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    checks = {
        "absent": doctor.package("no_such_package", "pip install it"),
        "cracked": doctor.package("cracked", "pip install it"),
        "slow": doctor.package("numpy", "", "import time; time.sleep(60)"),
        "numpy": doctor.package("numpy", ""),
    }
    found = {name: check(1.0 if name == "slow" else 60.0) for name, check in checks.items()}
    assert found["absent"] == doctor.Finding("absent", "not installed", "pip install it")
    assert found["cracked"].state == "broken" and "libmpi.so is missing" in found["cracked"].text
    assert found["slow"].state == "broken" and "within 1 s" in found["slow"].text
    assert found["numpy"].state == "works" and re.match(r"\d+\.\d+", found["numpy"].text)
    for kept, status in ((["absent", "numpy"], 0), (["cracked", "numpy"], 1)):
        monkeypatch.setattr(doctor, "CHECKS", {name: checks[name] for name in kept})
        result = invoke("doctor")
        assert result.exit_code == status
        assert "– absent" in result.output or "✗ cracked" in result.output
