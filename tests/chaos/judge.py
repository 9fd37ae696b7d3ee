"""Launch a case as a user would, watch its processes, and judge the outcome: recovered, one clear error, or a bug."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.cluster import launch
from hvdcompress.engine.saving import checkpoint
from tests.chaos.faults import FAULTS, SHAPES, STEPS, Case

PATIENCE = 15.0  #: seconds after the fault in which a launch must have ended, if its processes do not wait for a core
STARVED = 45.0  #: at most so many of the seconds in which processes waited for a core are added
STARTING = 120.0  #: seconds until the fault must have come
LEAVING = 5.0  #: seconds that processes may outlive their launcher
TOLERANCE = 1e-4  #: of the largest gradient that was given: sums are in float32
BUGS = {
    "hang": f"the launch ran for more than {PATIENCE:.0f} s after the fault, although it had a core",
    "difference": "ranks ended with different parameters, or some continued while others had failed",
    "loss": "the ranks' gradients are not the sum of what they received and kept",
    "leftover": "processes outlived their launcher",
    "unclear": "there was no error, or none that names the fault",
}


class Launched(NamedTuple):
    """What was seen of a launch from outside."""

    status: int | None  #: the launcher's exit status; None if it had to be ended
    fired: bool  #: whether the fault came
    seconds: float  #: from the fault to the launcher's end
    left: Sequence[str] = ()  #: processes that outlived the launcher


class Verdict(NamedTuple):
    """The outcome, "recovered", "error" or one of :data:`BUGS`, and the reason."""

    outcome: str
    why: str


def run(case: Case, folder: Path) -> Launched:
    """Run a case in an empty folder, which gets the ranks' files and ``log.txt``.

    Raises:
        LaunchError: the launcher is not installed.
    """
    (folder / "case.json").write_text(json.dumps(asdict(case)), encoding="utf-8")
    runner = ("-m", "mpi4py") if case.driver == "mpi" else ()  # ends all ranks when one ends by an exception
    program = (*runner, "-m", "tests.chaos.rank", str(folder.resolve()))
    lines = launch.lines(program, case.world_size, "ddp" if case.driver == "ddp" else "mpi")
    with launch.Ranks(lines, case.world_size, folder / "log.txt") as ranks:
        deadline, starved = time.monotonic() + STARTING, _starved()
        fault: dict[str, float] = {}
        while (status := ranks.status()) is None:
            if time.monotonic() > deadline + min(_starved() - starved, STARVED):
                _log_stacks(folder)
                break
            if not fault and (fault := _read(folder / "fault.json")):
                deadline, starved = fault["time"] + case.pause + PATIENCE, _starved()
            time.sleep(0.05)
        ended = time.monotonic()
        while (alive := ranks.alive()) and status is not None and time.monotonic() < ended + LEAVING:
            time.sleep(0.2)
    fault = _read(folder / "fault.json")
    left = [] if status is None else [str(process) for process in alive]
    return Launched(status, bool(fault), round(ended - fault.get("time", ended), 2), left)


def _starved() -> float:
    """Return the seconds since boot in which a process waited for a core (Linux: Documentation/accounting/psi.rst)."""
    with contextlib.suppress(OSError):
        some = Path("/proc/pressure/cpu").read_text(encoding="ascii").splitlines()[0]
        return int(some.rpartition("total=")[2]) / 1e6
    return 0.0


def _log_stacks(folder: Path) -> None:
    """Have every rank that has not ended write the stacks of its threads to the log."""
    for file in sorted(folder.glob("rank-*.json")):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(_read(file)["pid"]), signal.SIGUSR1)
            time.sleep(0.2)  # one after another


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def judge(case: Case, launched: Launched, folder: Path) -> Verdict:
    """Judge the launch of a case in ``folder``."""
    ranks = [_read(folder / f"rank-{rank}.json") for rank in range(case.world_size)]
    log = folder / "log.txt"
    tail = launch.tail(log)
    done = [rank for rank, said in enumerate(ranks) if said.get("ended") == "done"]
    if not launched.fired:
        return Verdict("unclear", f"the launch ended before the fault: {tail}")
    if launched.status is None:
        return Verdict("hang", f"ranks {done} had ended; {tail}")
    if launched.left:
        return Verdict("leftover", "; ".join(launched.left))
    if len(done) == case.world_size:
        return _judge_recovered(case, launched, ranks, folder)
    if done:
        return Verdict("difference", f"ranks {done} continued to the end, the others did not; {tail}")
    if not case.may_end:
        return Verdict("unclear", f"it ended, although it should have continued: {tail}")
    said = "\n".join([log.read_text(encoding="utf-8", errors="replace"), *(one.get("error", "") for one in ranks)])
    error = FAULTS[case.fault].error
    if launched.status == 0 or not re.search(error, said):
        return Verdict("unclear", f"exit status {launched.status}, and nothing matches {error}: {tail}")
    if lost := _lost_on_disk(case, folder):
        return Verdict("loss", lost)
    return Verdict("error", next((one["error"] for one in ranks if "error" in one), launch.tail(log, 2)))


def _judge_recovered(case: Case, launched: Launched, ranks: Sequence[Mapping[str, Any]], folder: Path) -> Verdict:
    if not case.may_recover:
        return Verdict("unclear", "it continued as if nothing had happened")
    if launched.status != 0:
        return Verdict("unclear", f"all ranks ended well, but the launcher's exit status is {launched.status}")
    if len({(one["digest"], one["done"]) for one in ranks}) > 1:
        return Verdict("difference", f"parameters or steps differ: {[one['done'] for one in ranks]} steps")
    if ranks[0]["done"] < STEPS - 1:
        return Verdict("unclear", f"it continued without an error, and took {ranks[0]['done']} of {STEPS} steps")
    sums = [dict(np.load(folder / f"rank-{rank}.npz")) for rank in range(case.world_size)]
    if lost := _lost(sums) or _lost_on_disk(case, folder):
        return Verdict("loss", lost)
    return Verdict("recovered", f"after {ranks[0]['done']} steps")


def _lost_on_disk(case: Case, folder: Path) -> str:
    """Say what the newest complete state on disk lacks of the gradients until its step; empty if nothing."""
    if not any((folder / "state").glob(f"step-*-rank-{case.world_size - 1}-of-*.safetensors")):
        return ""  # no step was saved by all ranks
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a warning that a newer step is not complete
            saved = [checkpoint.load(folder / "state", rank, case.world_size) for rank in range(case.world_size)]
    except FileNotFoundError:
        return ""
    except ValueError as error:
        return f"the saved state cannot be loaded: {error}"
    sums = []
    for rank, one in enumerate(saved):
        known = dict(np.load(folder / "sums" / f"{max(one['steps'].values())}-{rank}.npz"))
        kept = {name: one["state"].get(name, {}).get("residual", np.zeros(SHAPES[name])) for name in SHAPES}
        sums.append({**known, **{f"residual.{name}": array for name, array in kept.items()}})
    return f"on disk: {lost}" if (lost := _lost(sums)) else ""


def _lost(sums: Sequence[Mapping[str, Any]]) -> str:
    """Say which tensor's gradients were neither received nor kept as a residual; empty if none."""
    for name, shape in SHAPES.items():
        given = sum(one[f"given.{name}"] for one in sums)
        kept = sum(one[f"residual.{name}"].reshape(shape) for one in sums)
        there = len(sums) * sums[0][f"received.{name}"] + kept
        error = float(np.abs(given - there).max() / np.abs(given).max())
        if not error <= TOLERANCE:
            return f"tensor {name!r}: {error:.2g} of the largest sum is neither received nor kept"
    return ""
