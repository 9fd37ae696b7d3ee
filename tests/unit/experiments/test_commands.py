"""``python -m experiments``: every command has help without frameworks, and errors are a line and a status."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from experiments import __main__ as cli
from experiments.cluster.launch import LaunchError, Stopped
from tests.installed import runs_without


def invoke(*words):
    return CliRunner().invoke(cli.app, [str(word) for word in words], env={"COLUMNS": "200"})


def test_help_needs_no_framework():
    code = (
        "from typer.testing import CliRunner\n"
        "from experiments import __main__ as cli\n"
        "for words in ((), *((name,) for name in cli.COMMANDS)):\n"
        "    result = CliRunner().invoke(cli.app, [*words, '--help'])\n"
        "    assert result.exit_code == 0, (words, result.output, result.exception)\n"
    )
    runs_without(("torch", "tensorflow", "horovod", "mpi4py", "matplotlib", "jinja2", "sklearn", "psutil"), code)


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (ValueError("density = 2"), 2, "density = 2"),
        (FileNotFoundError(2, "No such file", "x.yaml"), 2, "x.yaml"),
        (ModuleNotFoundError("No module named 'sklearn'", name="sklearn"), 2, "sklearn is not installed: pip"),
        (LaunchError("rank 1 of 2 failed"), 1, "rank 1 of 2 failed"),
        (Stopped(2), 130, "every rank has ended"),
    ],
)
def test_errors_are_a_line_and_a_status(monkeypatch, error, status, words):
    def hosts():
        raise error

    monkeypatch.setattr("experiments.cluster.command.hosts", hosts)
    result = invoke("hosts")
    assert result.exit_code == status and words in result.stderr and "Traceback" not in result.stderr
