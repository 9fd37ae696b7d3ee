"""One launch for each driver and number of ranks: its promises and its own cases, run together.

Each driver has a file of tests, ``test_promises_DRIVER.py``: two files are run at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.installed import needs
from tests.launched.run_promises import CASE_SUBSETS, CASES
from tests.launching import MORE, Outcomes, case_names, check, outcomes
from tests.promises.table import DRIVERS, is_slow, names_in

HERE = Path(__file__).parent
SCRIPT = HERE / "run_promises.py"
SECONDS = {"tensorflow": 540, "torch": 300, "ddp": 300, "mpi": 270}
MODULES = {
    "torch": ("torch", "horovod"),
    "ddp": ("torch",),
    "tensorflow": ("tensorflow", "horovod"),
    "mpi": ("mpi4py",),
}


def cases(driver: str, launch: str) -> list[str]:
    """The cases of this driver alone that a launch runs."""
    names = [name for script in CASES.get(driver, ()) for name in case_names(HERE / f"{script}.py")]
    return list(CASE_SUBSETS.get((driver, launch), names))


def outcome(driver: str, launch: str, name: str, factory: pytest.TempPathFactory) -> Outcomes:
    """What the ranks of the launch wrote in which a promise or a case is tried."""
    needs(*MODULES[driver])
    slow = is_slow(driver, launch, name)
    every = [*names_in(driver, launch), *cases(driver, launch)]
    names = [each for each in every if is_slow(driver, launch, each) == slow]
    folder = factory.mktemp(f"{driver}-{launch}")
    # Horovod's timeline is off until a case starts it
    return outcomes(launch, SCRIPT, folder, *names, seconds=SECONDS[driver], DRIVER=driver, HOROVOD_TIMELINE="DYNAMIC")


def launched_tests(driver: str) -> tuple[Callable[..., None], Callable[..., None]]:
    """The tests of a driver's promises and of its own cases: a test for each launch and name."""
    return _test(driver, names_in), _test(driver, cases)


def _test(driver: str, names: Callable[[str, str], list[str]]) -> Callable[..., None]:
    each = [
        pytest.param(launch, name, marks=[pytest.mark.slow] if is_slow(driver, launch, name) else [])
        for launch in DRIVERS[driver].launches
        for name in names(driver, launch)
    ]

    @pytest.mark.timeout(SECONDS[driver] + MORE)
    @pytest.mark.parametrize("launch,name", each)
    def test(launch: str, name: str, tmp_path_factory: Any) -> None:
        check(f"{driver} {launch}", name, outcome(driver, launch, name, tmp_path_factory))

    return test
