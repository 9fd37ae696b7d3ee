"""``python -m experiments``: help without frameworks, errors as a line and a status, shared options, emulated hosts."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from experiments import __main__ as cli
from experiments import configfile
from experiments.cluster import launch
from experiments.cluster.hosts import Hosts
from experiments.cluster.launch import LaunchError, Stopped
from experiments.configfile import MethodsFile
from tests import ROOT
from tests.installed import runs_without


def invoke(*words):
    return CliRunner().invoke(cli.app, words, env={"COLUMNS": "200"})


def test_help_needs_no_framework():
    code = (
        "import typer.main\n"
        "from typer.testing import CliRunner\n"
        "from experiments import __main__ as cli\n"
        "names = typer.main.get_command(cli.app).commands\n"
        "for words in ((), *((name,) for name in names)):\n"
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
        (LaunchError("a rank of 2 failed"), 1, "a rank of 2 failed"),
        (Stopped(2), 130, "every rank has ended"),
    ],
)
def test_errors_are_a_line_and_a_status(monkeypatch, error, status, words):
    def fails():
        raise error

    monkeypatch.setattr("experiments.cluster.launch.stoppable", fails)
    result = invoke("hosts", "true")
    assert result.exit_code == status and words in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize("words", ["run quickstar", "bench resnet5", "scale scal"])
def test_a_wrong_name_gets_a_suggestion(words):
    wrong = invoke(*words.split())
    assert wrong.exit_code == 2 and "did you mean" in wrong.output


def test_all_methods_are_compared():
    compared = MethodsFile.open(configfile.CONFIGS / "bench" / "compare.yaml").methods
    # not `available()`, which also has methods that other tests have registered
    assert {each.method for each in compared} == {file.stem for file in ROOT.glob("hvdcompress/methods/[a-z]*.py")}


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ((None, "1gbit"), "need --hosts and the rate"),
        ((4, None), "need --hosts and the rate"),
        ((4, "1gbit", 6), "each host must get equally many ranks"),
        ((4, "fast"), "is not a rate"),
        ((1, "1gbit"), "from 2 to 64"),
    ],
)
def test_wrong_options_of_emulated_hosts(given, reason):
    with pytest.raises(ValueError, match=reason):
        configfile.emulated_hosts(*given)


# -- emulated hosts --------------------------------------------------------------------------------


def test_ddp_ranks_on_hosts_know_their_ranks():
    names = ("RANK", "GROUP_RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE")
    found = launch.lines(["x.py"], 4, "ddp", Hosts(2, "1gbit", ranks_per_host=2))
    given = [dict(word.split("=") for word in line if "=" in word) for line in found]
    assert [Path(line[0]).name for line in found] == ["host0", "host0", "host1", "host1"]
    assert ["".join(each[name] for name in names) for each in given] == ["000422", "101422", "210422", "311422"]
