"""Packaged configurations: found by name, copied, and part of a wheel; and ``python -m hvdcompress``."""

from __future__ import annotations

import configparser
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

from typer.testing import CliRunner

import hvdcompress
from experiments import __main__ as cli
from experiments import packaged
from experiments.training.experiment import Experiment
from tests import ROOT


def invoke(*words):
    return CliRunner().invoke(cli.app, [str(word) for word in words], env={"COLUMNS": "200"})


def test_all_methods_are_compared():
    compared = Experiment.open(packaged.FOLDER / "bench" / "compare.yaml").methods
    assert {entry.method for entry in compared} == set(hvdcompress.available())


def test_the_command_lists_prints_and_copies(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    listed = invoke("configs")
    assert listed.exit_code == 0 and "quickstart" in listed.output and "experiment" in listed.output
    assert invoke("configs", "quickstart").output == packaged.find("quickstart").file.read_text()
    assert invoke("configs", "quickstart", "--copy", "sub/mine.yaml").exit_code == 0
    assert Path("sub/mine.yaml").read_text() == packaged.find("quickstart").file.read_text()
    again = invoke("configs", "fit", "--copy", "sub/mine.yaml")
    assert (
        again.exit_code == 2 and "exists already" in again.output and "quickstart" in Path("sub/mine.yaml").read_text()
    )
    assert invoke("configs", "fit", "--copy", "sub").exit_code == 0 and Path("sub/fit.yaml").exists()
    for words in (["configs", "quickstar"], ["run", "quickstar"], ["bench", "resnet5"], ["scale", "scal"]):
        wrong = invoke(*words)
        assert wrong.exit_code == 2 and "did you mean" in wrong.output, words
    assert invoke("configs", "--copy", "x.yaml").exit_code == 2


def test_every_file_of_the_package_is_in_a_wheel():
    """Whatever is no Python file must match a pattern in setup.cfg."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    patterns = setup["options.package_data"]["hvdcompress"].split()
    package = ROOT / "hvdcompress"
    data = [str(file.relative_to(package)) for file in package.rglob("*") if file.is_file()]
    data = [name for name in data if not name.endswith(".py") and "__pycache__" not in name]
    assert len(data) > 30
    assert not [name for name in data if not any(fnmatchcase(name, pattern) for pattern in patterns)]
    folders = {file.parent for file in package.rglob("*.py")}
    assert all((folder / "__init__.py").exists() for folder in folders), "setuptools finds packages by it"


def test_the_projects_configs_are_the_packages():
    assert (ROOT / "configs").is_symlink() and (ROOT / "configs").resolve() == packaged.FOLDER


def test_python_m_hvdcompress():
    line = [sys.executable, "-m", "hvdcompress", "--version"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0 and done.stdout.strip() == hvdcompress.__version__, done.stderr
