"""What all commands have in common: help, errors, exit statuses, colours, forms of tables, completion, width."""

from __future__ import annotations

import csv
import io
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hvdcompress import cli, registry
from hvdcompress.lab import catalogue, doctor
from hvdcompress.lab.commands import looking
from hvdcompress.lab.output.table import Format

ROOT = Path(__file__).resolve().parents[2]


def invoke(*words, width=200):
    return CliRunner().invoke(cli.app, [str(word) for word in words], env={"COLUMNS": str(width)})


def shell(*words, **environment):
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    env.pop("COLUMNS", None)
    line = [sys.executable, "-m", "hvdcompress", *words]
    return subprocess.run(line, capture_output=True, text=True, timeout=60, env=env, stdin=subprocess.DEVNULL)


def on_a_terminal(*words, **environment):
    """What a command writes where it has a terminal of 80 columns."""
    ours, theirs = pty.openpty()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "COLUMNS": "80", **environment}
    line = [sys.executable, "-m", "hvdcompress", *words]
    with subprocess.Popen(line, stdin=theirs, stdout=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        found = b""
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # how a terminal says that nobody writes to it any more
                break
            if not piece:
                break
            found += piece
        process.wait(timeout=60)
    os.close(ours)
    return found.decode()


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


def test_help_has_groups_and_exit_statuses():
    text = invoke("--help").output
    assert all(f"─ {title} " in text for title in (cli.TRAIN, cli.MEASURE, cli.LOOK))
    assert "Exit status: 0" in text and "130" in text


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


def test_debug_stands_anywhere_and_in_the_environment(monkeypatch):
    monkeypatch.setattr(catalogue, "describe", fail(ValueError("no")))
    assert "Traceback" in invoke("--debug", "methods", "topk").output
    monkeypatch.setenv("HVDCOMPRESS_DEBUG", "1")
    assert "Traceback" in invoke("methods", "topk").output


def test_a_wrong_word_is_a_usage_error():
    assert invoke("nothing").exit_code == 2 and "No such command" in invoke("nothing").output
    assert invoke("methods", "--format", "xml").exit_code == 2


# -- colours and forms -----------------------------------------------------------------------------


def test_colours_only_on_a_terminal_that_wants_them():
    assert "\x1b" not in shell("methods").stdout + shell("methods", "nonsense").stderr
    with_colours, without = (on_a_terminal("methods", "nonsense", **more) for more in ({}, {"NO_COLOR": "1"}))
    assert "\x1b[31m" in with_colours and "no method 'nonsense'" in with_colours
    assert "\x1b[31m" not in without and "no method 'nonsense'" in without


@pytest.mark.parametrize("words", [("methods",), ("methods", "topk"), ("configs",)], ids=" ".join)
def test_tables_in_every_form(words):
    data = json.loads(invoke(*words, "--format", "json").output)
    rows = list(csv.reader(io.StringIO(invoke(*words, "--format", "csv").output)))
    lines = invoke(*words, "--format", "markdown").output.splitlines()
    assert len(data["rows"]) == len(rows) - 1 == len(lines) - 2 > 3
    assert set(Format) == {"text", "markdown", "csv", "json"}


def test_several_tables_are_one_json_value():
    words = ("scale", "--set", "100000", "--workers", "2,4", "--methods", "fp16", "--rate", "100mbit,1gbit")
    data = json.loads(invoke(*words, "--format", "json").output)
    assert [table["title"].split(":")[0] for table in data][:2] == [
        "Seconds per exchange at 100 Mbit/s",
        "Seconds per exchange at 1 Gbit/s",
    ]
    assert "**Seconds per exchange at 1 Gbit/s" in invoke(*words, "--format", "markdown").output


@pytest.mark.parametrize(
    "words", [("methods",), ("methods", "gradiveq"), ("configs",), ("scale", "--set", "100000")], ids=" ".join
)
def test_eighty_columns_are_enough(words):
    output = invoke(*words, width=80).output
    wide = [line for line in output.splitlines() if len(line) > 80 and not line.startswith((" " * 4, ">>>", "..."))]
    assert not wide, "equations and examples stay as they are written"
    if words[0] == "scale":
        rows = [line for line in output.splitlines() if line.startswith("scalecom")]
        assert len(rows) == 2 and all(len(row.split()) > 5 for row in rows), "a line per method"


# -- completion ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell_name", ["bash", "zsh", "fish"])
def test_completion_scripts(shell_name):
    script = invoke("completion", shell_name).output
    assert "_HVDCOMPRESS_COMPLETE" in script and "hvdcompress" in script


def completed(words):
    line = ["hvdcompress", *words]
    done = shell(_HVDCOMPRESS_COMPLETE="complete_bash", COMP_WORDS=" ".join(line), COMP_CWORD=str(len(line) - 1))
    return done.stdout.split()


def test_commands_methods_and_configurations_complete():
    assert completed(["me"]) == ["methods"]
    assert completed(["methods", "scal"]) == ["scalecom"]
    assert completed(["run", "quick"]) == ["quickstart", "quickstart_tensorflow"]


def test_bash_takes_the_script(tmp_path):
    script = f'eval "$({sys.executable} -m hvdcompress completion bash)" && complete -p hvdcompress'
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 0 and "-F _hvdcompress_completion" in done.stdout, done.stderr


# -- what single commands say ----------------------------------------------------------------------


@pytest.mark.parametrize("id", registry.available())
def test_a_method_s_options_have_legal_values_that_are_so(id):
    found = {option.name: option for option in catalogue.options(registry.classes()[id])}
    for name, option in found.items():
        assert option.legal not in ("", "str") and option.about != "", (id, name)
        for word in option.legal.split(" | ") if " | " in option.legal and "…" not in option.legal else ():
            value = {"true": True, "false": False}.get(word, word)
            if name not in ("feedback", "paper"):  # which stand for, or need, other options
                alone = {} if name != "unbiased" else {"feedback": "none"}
                assert getattr(registry.get(id, **{name: value}, **alone), name) == value
    assert found["feedback"].legal == "none | plain | lowpass | momentum"


def test_scale_warns_beyond_its_fit():
    words = ("scale", "--set", "100000", "--workers", "2", "--methods", "fp16", "--rate")
    assert "10 Gbit/s is beyond the fit, whose links had 100 Mbit/s to 1 Gbit/s" in invoke(*words, "10gbit").output
    assert "beyond the fit" not in invoke(*words, "100mbit,1gbit").output


def test_doctor_says_what_it_is_at(monkeypatch, capfd):
    monkeypatch.setattr(doctor, "CHECKS", {"numpy": doctor.package("numpy", ""), "x": doctor.package("no_such", "pip")})
    done = invoke("doctor")
    assert done.exit_code == 0 and "[1/2] checking numpy …" in done.output and "[2/2]" in done.output
    table = CliRunner().invoke(cli.app, ["doctor", "--format", "json"])
    rows = json.loads(table.stdout)["rows"]
    assert [row["state"] for row in rows] == ["works", "absent"] and rows[1]["advice"] == "pip"
    assert looking.doctor.__doc__
