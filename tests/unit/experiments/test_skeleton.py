"""``hvdcompress new-method``: what it writes passes the test that it writes, next to the sources and on its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from experiments import __main__ as cli
from tests import ROOT


def new(*words):
    return CliRunner().invoke(cli.app, ["new-method", *words], env={"COLUMNS": "200"})


def run(folder, *line):
    return subprocess.run([sys.executable, "-m", *line], cwd=folder, capture_output=True, text=True, timeout=120)


def test_what_is_written_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    result = new("my_topk")
    assert result.exit_code == 0, result.output
    folder = tmp_path / "my_topk"
    assert {file.relative_to(folder).as_posix() for file in folder.rglob("*.*")} == {
        "my_topk.py",
        "pyproject.toml",
        "tests/test_my_topk.py",
    }
    done = run(folder, "pytest", "-q", "-p", "no:cacheprovider")
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout
    for check in (("ruff", "check", "--select", "E,F,I"), ("ruff", "format", "--check")):
        done = run(folder, *check, "--isolated", "--no-cache", "--line-length", "120", ".")
        assert done.returncode == 0, done.stdout + done.stderr
    again = new("my_topk")
    assert again.exit_code == 2 and "exists already" in again.output


def test_in_a_checkout_it_goes_to_the_sources(tmp_path, monkeypatch):
    (tmp_path / "hvdcompress" / "methods").mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "make_golden.py").touch()
    monkeypatch.chdir(tmp_path)
    result = new("my_topk")
    assert result.exit_code == 0 and "make_golden.py my_topk" in result.output
    assert "from hvdcompress.methods.my_topk import MyTopk" in Path("tests/unit/methods/test_my_topk.py").read_text()
    assert Path("hvdcompress/methods/my_topk.py").is_file() and not Path("my_topk").exists()
