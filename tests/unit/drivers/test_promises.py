"""Every promise under the loopback, and the table of promises itself.

``tests/launched/test_promises_DRIVER.py`` try the drivers of launched ranks, with the cases of a driver alone.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import Skip
from tests.launched.promise_launches import HERE, cases
from tests.launching import num_nodes_of, world_size_of
from tests.promises import DRIVERS, EXCEPTIONS, PROMISES, keep
from tests.promises.drivers.loopback import in_threads
from tests.promises.table import QUICK, SUBSETS, is_slow, names_in


@pytest.mark.parametrize(
    "launch,name",
    [
        pytest.param(launch, name, marks=[pytest.mark.slow] if is_slow("loopback", launch, name) else [])
        for launch in DRIVERS["loopback"].launches
        for name in names_in("loopback", launch)
    ],
)
def test_in_process(launch: str, name: str, tmp_path: Path) -> None:
    try:
        in_threads(world_size_of(launch), num_nodes_of(launch), tmp_path, lambda driver: keep(PROMISES[name], driver))
    except Skip as skip:
        pytest.skip(str(skip))


# -- the table itself ------------------------------------------------------------------------------------


def test_every_driver_has_its_tests() -> None:
    assert {path.stem.removeprefix("test_promises_") for path in HERE.glob("test_promises_*.py")} == {*DRIVERS} - {
        "loopback"
    }


@pytest.mark.parametrize("driver", DRIVERS)
def test_every_promise_is_tried_or_has_a_reason(driver: str) -> None:
    tried = {name for launch in DRIVERS[driver].launches for name in names_in(driver, launch)}
    assert tried == set(PROMISES), f"neither tried nor excepted: {set(PROMISES) - tried}"


def test_the_table_speaks_of_what_there_is() -> None:
    for driver, name in EXCEPTIONS:
        assert driver in DRIVERS and name in PROMISES, (driver, name)
    for (driver, launch), names in SUBSETS.items():
        assert launch in DRIVERS[driver].launches and set(names) <= set(PROMISES), (driver, launch)
        assert any((driver, other) not in SUBSETS for other in DRIVERS[driver].launches), "some launch tries all"
    for (driver, launch), names in QUICK.items():
        assert launch in DRIVERS[driver].launches, (driver, launch)
        assert set(names) <= {*names_in(driver, launch), *cases(driver, launch)}, (driver, launch)
        assert any((driver, other) not in {*QUICK, *SUBSETS} for other in DRIVERS[driver].launches), (
            "some launch tries all"
        )
    assert all(entry.reason for entry in EXCEPTIONS.values())
    assert all(one.text.endswith(".") for one in PROMISES.values()), "a promise is a sentence"
