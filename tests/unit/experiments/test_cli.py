"""The command: what it refuses before anything starts, and where it writes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from typer.testing import CliRunner

from experiments import __main__ as cli
from experiments.cluster import launcher


def invoke(*words):
    return CliRunner().invoke(cli.app, [str(word) for word in words], env={"COLUMNS": "200"})


# -- the line that is run, its environment and its log -------------------------------------------


def test_the_environment_of_ranks(monkeypatch):
    monkeypatch.setattr(launcher.os, "cpu_count", lambda: 8)
    few, many = launcher.environment(2), launcher.environment(9)
    assert few["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    assert few["OMP_NUM_THREADS"] == "1" and int(few["HOROVOD_CACHE_CAPACITY"]) > 1024
    assert "OMPI_MCA_mpi_yield_when_idle" not in few and many["OMPI_MCA_mpi_yield_when_idle"] == "1"
