"""What all commands have in common: help, errors, exit statuses, colours, forms of tables, completion, width."""

from __future__ import annotations

import csv
import io
import json

import pytest
from typer.testing import CliRunner

from experiments import __main__ as cli
from experiments import catalogue
from experiments.output.table import Format


def invoke(*words, width=200):
    return CliRunner().invoke(cli.app, [str(word) for word in words], env={"COLUMNS": str(width)})


def names(group, path=()):
    """Every command's words."""
    for name, command in group.commands.items():
        yield (*path, name)
        if hasattr(command, "commands"):
            yield from names(command, (*path, name))


def all_commands():
    import typer.main

    return list(names(typer.main.get_command(cli.app)))


@pytest.mark.parametrize("words", all_commands(), ids=" ".join)
def test_every_command_has_help_with_examples(words):
    result = invoke(*words, "--help", width=80)
    assert result.exit_code == 0 and max(map(len, result.output.splitlines())) <= 80
    if words != ("bench",):
        assert "Examples:" in result.output and "hvdcompress" in result.output.split("Examples:")[1]


# -- errors ----------------------------------------------------------------------------------------


def fail(error):
    def describe(*_):
        raise error

    return describe


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (ValueError("density = 2"), 2, "density = 2"),
        (FileNotFoundError(2, "No such file", "x.yaml"), 2, "x.yaml"),
        (ModuleNotFoundError("No module named 'sklearn'", name="sklearn.datasets"), 2, "hvdcompress[examples]"),
        (ModuleNotFoundError("No module named 'other'", name="other"), 2, "the package other is not installed"),
        (ZeroDivisionError("division by zero"), 1, "ZeroDivisionError: division by zero"),
    ],
)
def test_errors_are_a_line_and_a_status(monkeypatch, error, status, words):
    monkeypatch.setattr(catalogue, "describe", fail(error))
    quiet, loud = invoke("methods", "topk"), invoke("methods", "topk", "--debug")
    assert quiet.exit_code == loud.exit_code == status
    assert quiet.output.startswith("error: ") and words in quiet.output
    assert "Traceback" not in quiet.output and "Traceback" in loud.output
    assert ("with --debug" in quiet.output) == (status == 1)


# -- colours and forms -----------------------------------------------------------------------------


@pytest.mark.parametrize("words", [("methods",), ("methods", "topk"), ("configs",)], ids=" ".join)
def test_tables_in_every_form(words):
    data = json.loads(invoke(*words, "--format", "json").output)
    rows = list(csv.reader(io.StringIO(invoke(*words, "--format", "csv").output)))
    lines = invoke(*words, "--format", "markdown").output.splitlines()
    assert len(data["rows"]) == len(rows) - 1 == len(lines) - 2 > 3
    assert set(Format) == {"text", "markdown", "csv", "json"}
