"""Packaged configurations: found by name, copied, and part of a wheel; and ``python -m hvdcompress``."""

from __future__ import annotations

import configparser
import json
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from typer.testing import CliRunner

import hvdcompress
from hvdcompress import cli, registry
from hvdcompress.lab import packaged
from hvdcompress.lab.advise.validate import Validation
from hvdcompress.lab.bench.config import Bench
from hvdcompress.lab.training.experiment import Experiment
from tests import ROOT


def invoke(*words):
    return CliRunner().invoke(cli.app, [str(word) for word in words], env={"COLUMNS": "200"})


def test_names_are_unique_and_every_file_has_a_first_line():
    every = packaged.every()
    assert len({one.name for one in every}) == len(every) == len(list(packaged.FOLDER.rglob("*.yaml")))
    assert all(one.about and len(one.about) < 110 for one in every)
    assert {one.kind for one in every} == set(packaged.KINDS.values()) | set(packaged.USES.values())
    assert [one.name for one in packaged.every(["method"])] == hvdcompress.available()


def test_all_methods_are_compared():
    compared = Experiment.open(packaged.FOLDER / "bench" / "compare.yaml").methods
    assert {entry.method for entry in compared} == set(hvdcompress.available())


@pytest.mark.parametrize("one", packaged.every(), ids=lambda one: one.name)
def test_files_are_of_their_kinds(one):
    if one.name == "saved":
        pytest.skip("its gradients must be made first")
    opens = {"benchmark": Bench.open, "method": hvdcompress.load, "validation": Validation.open}
    assert opens.get(one.kind, Experiment.open)(one.file)


def test_a_path_that_exists_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert packaged.resolve("quickstart") == packaged.FOLDER / "experiments" / "quickstart.yaml"
    Path("quickstart").write_text("x")
    assert packaged.resolve("quickstart") == Path("quickstart")
    with pytest.raises(ValueError, match="no packaged benchmark configuration.*did you mean 'resnet50'.*: alexnet, "):
        packaged.resolve("resnet5", ["benchmark"])
    with pytest.raises(ValueError, match="no file 'resnet50'"):
        packaged.resolve("resnet50", ["experiment"])


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


def test_tables_of_the_catalogue_have_every_format():
    rows = json.loads(invoke("methods", "--format", "json").output)["rows"]
    assert [row["method"] for row in rows] == list(registry.classes())
    assert invoke("configs", "--format", "csv").output.startswith("name,kind,about\nall_methods,experiment,")
    assert invoke("methods", "--format", "markdown").output.startswith("| method | paper |")


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
