"""Launching ranks: a rank that dies ends all and is named, and no process survives Ctrl-C, a timeout or a kill."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import psutil
import pytest

from experiments.cluster import launch
from tests.installed import needs

#: by driver: each knows its rank by another variable
RANK = "next(os.environ[k] for k in ('OMPI_COMM_WORLD_RANK', 'HOROVOD_RANK', 'RANK') if k in os.environ)"
PROGRAM = f"""
import os, sys, time
rank = int({RANK})
print(f"rank {{rank}} is here\\n", end="", flush=True)  # one write: mpirun mixes the pieces of several ranks
if rank == 1:
    DEATH
time.sleep(60)
"""


@pytest.fixture
def program(tmp_path):
    """Write a program that sleeps for a minute, or does something else on rank 1."""

    def write(death="pass"):
        (tmp_path / "sleeper.py").write_text(PROGRAM.replace("DEATH", death))
        return [str(tmp_path / "sleeper.py")]

    return write


def alive(program):
    """Return the processes that run a program: launchers and ranks."""
    return [
        process
        for process in psutil.process_iter(["cmdline", "status"])
        if program[0] in " ".join(process.info["cmdline"] or []) and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


def wait_for(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("driver", "package", "death"),
    [
        ("mpi", "mpi4py", "sys.exit(3)"),
        ("ddp", "torch", "os.kill(os.getpid(), 9)"),
        ("gloo", "horovod", "sys.exit(3)"),
    ],
)
def test_a_rank_that_dies_ends_all(driver, package, death, program):
    needs(package)
    script = program(f"time.sleep(1); {death}")
    with pytest.raises(launch.LaunchError, match="a rank of 2 failed"):
        launch.run(script, 2, driver, timeout=50)
    assert not alive(script)


def test_a_log_keeps_what_it_holds(program, tmp_path):
    needs("torch")
    (tmp_path / "log").write_text("earlier\n")
    with launch.Ranks(launch.lines(program("sys.exit(3)"), 2, "ddp"), 2, tmp_path / "log") as ranks:
        wait_for(ranks.status, 50)
    log = (tmp_path / "log").read_text()
    assert log.startswith("earlier\n") and "rank 1 is here\n" in log


def test_a_timeout_ends_every_rank(program):
    needs("torch")
    script = program()
    with pytest.raises(launch.LaunchError, match="did not end within 3 s"):
        launch.run(script, 2, "ddp", timeout=3)
    assert not alive(script)


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_no_process_survives_the_command(number, program):
    needs("torch")
    script = program()
    code = f"from experiments.cluster import launch; launch.run({script}, 2, 'ddp')"
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL) as command:
        wait_for(lambda: len(alive(script)) == 4, 30)  # the command, torchrun and its two ranks
        begun = alive(script)
        command.send_signal(number)
        command.wait(30)
    wait_for(lambda: not alive(script), 15)
    assert len(begun) == 4 and not alive(script)
