"""One launch for each door and number of ranks: its promises and its driver's own cases, run together.

Each door has a file of tests, ``test_promises_DOOR.py``: files are what is shared out where two launches run at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from installed import needs
from launching import MORE, Outcomes, case_names, check, outcomes
from promises.table import DOORS, is_slow, names_in
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
    names = [name for script in CASES.get(door, ()) for name in case_names(HERE / f"{script}.py")]
    return list(CASE_SUBSETS.get((door, launch), names))


def outcome(door: str, launch: str, name: str, factory: pytest.TempPathFactory) -> Outcomes:
    """What the ranks of the launch wrote in which a promise or a case is tried."""
    needs(*MODULES[door])
    slow = is_slow(door, launch, name)
    every = [*names_in(door, launch), *cases(door, launch)]
    names = [each for each in every if is_slow(door, launch, each) == slow]
    folder = factory.mktemp(f"{door}-{launch}")
    # Horovod's timeline is off until a case starts it
    return outcomes(launch, SCRIPT, folder, *names, seconds=SECONDS[door], DOOR=door, HOROVOD_TIMELINE="DYNAMIC")


def launched_tests(door: str) -> tuple[Callable[..., None], Callable[..., None]]:
    """The tests of a door's promises and of its driver's own cases: a test for each launch and name."""
    return _test(door, names_in), _test(door, cases)


def _test(door: str, names: Callable[[str, str], list[str]]) -> Callable[..., None]:
    each = [
        pytest.param(launch, name, marks=[pytest.mark.slow] if is_slow(door, launch, name) else [])
        for launch in DOORS[door].launches
        for name in names(door, launch)
    ]

    @pytest.mark.parallel
    @pytest.mark.timeout(SECONDS[door] + MORE)
    @pytest.mark.parametrize("launch,name", each)
    def test(launch: str, name: str, tmp_path_factory: Any) -> None:
        check(f"{door} {launch}", name, outcome(door, launch, name, tmp_path_factory))

    return test
