"""One launch for each door and number of ranks: its promises and its driver's own cases, run together."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import Outcomes, case_names, outcomes
from promises import PROMISES
from promises.table import OWN_LAUNCH, SLOW, together
from run_door import CASE_SUBSETS, CASES

HERE = Path(__file__).parent
SCRIPT = HERE / "run_door.py"
SECONDS = {"tensorflow": 540, "torch": 300, "mpi": 270}
MODULES = {"torch": ("torch", "horovod"), "tensorflow": ("tensorflow", "horovod"), "mpi": ("mpi4py",)}


def cases(door: str, launch: str) -> list[str]:
    """The driver's own cases that a launch runs."""
    names = [name for script in CASES[door] for name in case_names(HERE / f"{script}.py")]
    return list(CASE_SUBSETS.get((door, launch), names))


def outcome(door: str, launch: str, name: str, factory: pytest.TempPathFactory) -> Outcomes:
    """What the ranks of the launch wrote in which a promise or a case is tried."""
    for module in MODULES[door]:
        pytest.importorskip(module)
    own = (door, name) in OWN_LAUNCH
    slow = name in SLOW.get((door, launch), ())
    names = [*together(door, launch, slow), *(() if slow else cases(door, launch))]
    names = [name] if own else names
    seconds = PROMISES[name].seconds + 20 if own else SECONDS[door]
    return outcomes(launch, SCRIPT, factory.mktemp(f"{door}-{launch}"), *names, seconds=seconds, DOOR=door)
