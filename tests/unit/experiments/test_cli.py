"""The command: what it refuses before anything starts, and where it writes."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from typer.testing import CliRunner

from experiments import __main__ as cli
from experiments import doctor
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
