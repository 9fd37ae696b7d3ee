"""Launch a case as a user would, and watch its processes until they have ended, or should have."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from experiments.cluster import launcher
from experiments.torture.faults import Case

__all__ = ["PATIENCE", "Launched", "launch"]

PATIENCE = 15.0  #: seconds from the fault in which a launch must have ended, on processors of its own
STARVED = 45.0  #: seconds, at most, that are granted beyond for such in which processes waited for a processor
STARTING = 120.0  #: seconds that ranks may take to come to the fault
LEAVING = 5.0  #: seconds that processes may outlive their launcher
MODULE = "experiments.torture.rank"


@dataclass(frozen=True)
class Launched:
    """What was seen of a launch from outside.

    Attributes:
        status: the launcher's exit status; None if it had to be ended.
        fired: whether the fault came.
        seconds: from the fault to the launcher's end.
        left: processes that outlived the launcher, as text.
    """

    status: int | None
    fired: bool
    seconds: float
    left: tuple[str, ...]


def line(case: Case, folder: Path) -> list[str]:
    """The command line of a case's launcher.

    Raises:
        LaunchError: the launcher is not installed.
    """
    program = ("-m", MODULE, str(folder))
    if case.driver == "ddp":
        return launcher.command(case.ranks, "ddp", *program)
    mpirun = launcher.mpirun()
    if mpirun is None:
        raise launcher.LaunchError("there is no mpirun: install Open MPI, or choose another --driver")
    # what horovodrun starts, too, once it has imported every framework to ask what Horovod was built for
    start = [mpirun, "--oversubscribe", "-bind-to", "none", "-np", str(case.ranks), sys.executable]
    # mpi4py's runner ends all ranks when one ends by an exception
    return [*start, *(("-m", "mpi4py") if case.driver == "mpi" else ()), *program]


def launch(case: Case, folder: Path) -> Launched:
    """Run a case in an empty folder.

    Raises:
        LaunchError: its launcher is not installed.
    """
    case.write(folder)
    fault: dict[str, float] = {}
    with launcher.Ranks(line(case, folder.resolve()), case.ranks, folder / "log.txt") as running:
        deadline, stopped = time.monotonic() + STARTING, case.fault == "paused"
        before = starved()
        while (status := running.process.poll()) is None:
            if time.monotonic() > deadline + min(starved() - before, STARVED):
                _stacks(folder)
                break
            if not fault and (fault := _read(folder / "fault.json")):
                deadline, before = fault["time"] + case.pause + PATIENCE, starved()
            if fault and stopped and time.monotonic() > fault["time"] + case.seconds:
                stopped = False
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(fault["pid"]), signal.SIGCONT)
            time.sleep(0.05)
        ended, fault = time.monotonic(), fault or _read(folder / "fault.json")
        left = () if status is None else _left(running)
    return Launched(status, bool(fault), ended - fault.get("time", ended), left)


def starved() -> float:
    """Seconds, since the system started, in which some process waited for a processor; 0 where the system cannot say.

    Linux's pressure stall information: Documentation/accounting/psi.rst in its sources.
    """
    with contextlib.suppress(OSError):
        some = Path("/proc/pressure/cpu").read_text(encoding="ascii").splitlines()[0]
        return int(some.rpartition("total=")[2]) / 1e6
    return 0.0


def _stacks(folder: Path) -> None:
    """Have every rank that has not ended write the stacks of its threads to the log."""
    for file in sorted(folder.glob("rank-*.json")):
        if (pid := _read(file).get("pid")) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGUSR1)
                time.sleep(0.2)  # one after another


def _read(file: Path) -> dict[str, float]:
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def _left(running: launcher.Ranks) -> tuple[str, ...]:
    """What outlives the launcher for longer than it takes to leave."""
    deadline = time.monotonic() + LEAVING
    while (alive := running.alive()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return tuple(str(process) for process in alive)
