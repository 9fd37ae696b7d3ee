"""Every promise at every door: ``promises/`` says what is promised, ``doors/`` how each driver is asked.

Here are the door within one process, and the table itself. ``test_promises_DOOR.py`` are the doors of launched ranks,
with what a driver's framework alone has: the cases that ``run_door.py`` lists.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from door_launches import HERE, cases
from doors.loopback import in_threads
from harness import Skip
from promises import DOORS, EXCEPTIONS, PROMISES, keep
from promises.table import QUICK, SUBSETS, is_slow, names_in


@pytest.mark.parametrize(
    "launch,name",
    [
        pytest.param(launch, name, marks=[pytest.mark.slow] if is_slow("loopback", launch, name) else [])
        for launch in DOORS["loopback"].launches
        for name in names_in("loopback", launch)
    ],
)
def test_in_process(launch: str, name: str, tmp_path: Path) -> None:
    try:
        in_threads(int(launch.split("-")[1]), tmp_path, lambda door: keep(PROMISES[name], door))
    except Skip as skip:
        pytest.skip(str(skip))


# -- the table itself ------------------------------------------------------------------------------------


def test_every_door_has_its_tests() -> None:
    assert {path.stem.removeprefix("test_promises_") for path in HERE.glob("test_promises_*.py")} == {*DOORS} - {
        "loopback"
    }


@pytest.mark.parametrize("door", DOORS)
def test_every_promise_is_tried_or_has_a_reason(door: str) -> None:
    tried = {name for launch in DOORS[door].launches for name in names_in(door, launch)}
    assert tried == set(PROMISES), f"neither tried nor excepted: {set(PROMISES) - tried}"


def test_the_table_speaks_of_what_there_is() -> None:
    for door, name in EXCEPTIONS:
        assert door in DOORS and name in PROMISES, (door, name)
    for (door, launch), names in SUBSETS.items():
        assert launch in DOORS[door].launches and set(names) <= set(PROMISES), (door, launch)
        assert any((door, other) not in SUBSETS for other in DOORS[door].launches), "some launch tries all"
    for (door, launch), names in QUICK.items():
        assert launch in DOORS[door].launches, (door, launch)
        assert set(names) <= {*names_in(door, launch), *cases(door, launch)}, (door, launch)
        assert any((door, other) not in {*QUICK, *SUBSETS} for other in DOORS[door].launches), "some launch tries all"
    assert all(entry.reason for entry in EXCEPTIONS.values())
    assert all(one.text.endswith(".") for one in PROMISES.values()), "a promise is a sentence"
