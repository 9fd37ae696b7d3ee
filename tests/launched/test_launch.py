"""Launching ranks: one that dies ends all and is named, and nothing outlives Ctrl-C, a timeout or a kill."""

from __future__ import annotations

import os
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
print("rank", rank, "is here", flush=True)
if rank == 1:
    DEATH
time.sleep(60)
"""
DRIVERS = {"mpi": ["mpi4py"], "ddp": ["torch"], "gloo": ["horovod"]}
DEATHS = ("sys.exit(3)", "os.kill(os.getpid(), 9)", "sys.exit(3)")
drivers = pytest.mark.parametrize("driver", DRIVERS)


@pytest.fixture
def program(tmp_path):
    """Write a program that sleeps for a minute, or does something else on rank 1."""

    def write(death="pass"):
        (tmp_path / "sleeper.py").write_text(PROGRAM.replace("DEATH", death))
        return [str(tmp_path / "sleeper.py")]

    return write


def alive(program):
    """Processes that run a program: launchers and ranks."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = " ".join(process.info["cmdline"] or [])
        if os.path.basename(program[0]) in words and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


@pytest.mark.parametrize(("driver", "death"), zip(DRIVERS, DEATHS, strict=True))
def test_a_rank_that_dies_ends_all_and_is_named(driver, death, program, tmp_path):
    needs(*DRIVERS[driver])
    with pytest.raises(launch.LaunchError, match="rank 1 of 2 failed"):
        launch.run(script := program(f"time.sleep(1); {death}"), 2, driver, log=tmp_path / "log", timeout=50)
    assert not alive(script)


def test_what_ranks_print_is_returned_and_logged(tmp_path):
    needs("torch")
    (tmp_path / "hello.py").write_text("import os; print('rank', os.environ['RANK'])")
    log, polled = tmp_path / "log", []
    for _ in range(2):
        text = launch.run([str(tmp_path / "hello.py")], 2, "ddp", log=log, poll=lambda: polled.append(1))
        assert {"rank 0", "rank 1"} <= set(text.splitlines())
    assert polled and log.read_text().count("rank 1\n") == 2


def test_a_timeout_ends_every_rank(program):
    needs("torch")
    with pytest.raises(launch.LaunchError, match="did not end within 4 s"):
        launch.run(script := program(), 2, "ddp", timeout=4)
    assert not alive(script)


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_the_command(number, program):
    needs("torch")
    script = program()
    code = f"from experiments.cluster import launch; launch.run({script}, 2, 'ddp')"
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL) as command:
        deadline = time.monotonic() + 30
        while len(alive(script)) < 4 and time.monotonic() < deadline:  # the command, torchrun and its two ranks
            time.sleep(0.1)
        begun = alive(script)
        command.send_signal(number)
        command.wait(30)
    deadline = time.monotonic() + 15
    while alive(script) and time.monotonic() < deadline:
        time.sleep(0.1)
    left = alive(script)
    for process in left:
        process.kill()
    assert len(begun) == 4 and not left
