"""One launch for each door and number of ranks: its promises and its driver's own cases, run together."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import Outcomes, case_names, outcomes
from promises.table import is_slow, names_in
from run_door import CASE_SUBSETS, CASES

HERE = Path(__file__).parent
SCRIPT = HERE / "run_door.py"
SECONDS = {"tensorflow": 540, "torch": 300, "ddp": 300, "mpi": 270}
MODULES = {
    "torch": ("torch", "horovod"),
    "ddp": ("torch",),
    "tensorflow": ("tensorflow", "horovod"),
    "mpi": ("mpi4py",),
}


def cases(door: str, launch: str) -> list[str]:
    """The driver's own cases that a launch runs."""
    names = [name for script in CASES[door] for name in case_names(HERE / f"{script}.py")]
    return list(CASE_SUBSETS.get((door, launch), names))


def outcome(door: str, launch: str, name: str, factory: pytest.TempPathFactory) -> Outcomes:
    """What the ranks of the launch wrote in which a promise or a case is tried."""
    for module in MODULES[door]:
        pytest.importorskip(module)
    slow = is_slow(door, launch, name)
    every = [*names_in(door, launch), *cases(door, launch)]
    names = [each for each in every if is_slow(door, launch, each) == slow]
    folder = factory.mktemp(f"{door}-{launch}")
    # Horovod's timeline is off until a case starts it
    return outcomes(launch, SCRIPT, folder, *names, seconds=SECONDS[door], DOOR=door, HOROVOD_TIMELINE="DYNAMIC")
