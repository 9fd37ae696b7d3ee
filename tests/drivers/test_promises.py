"""Every promise at every door: ``promises/`` says what is promised, ``doors/`` how each driver is asked. And what a
driver's framework alone has: the cases that ``run_door.py`` lists."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from door_launches import SECONDS, cases, outcome
from doors.loopback import in_threads
from harness import Skip
from launching import MORE, check
from promises import DOORS, EXCEPTIONS, PROMISES, keep
from promises.table import QUICK, SUBSETS, is_slow, names_in

LAUNCHES = [(door, launch) for door, entry in DOORS.items() if door != "loopback" for launch in entry.launches]
QUIET = "sums_are_the_loopbacks"  #: what is tried in the launches whose log must be clean
SLOWEST = max(SECONDS.values()) + MORE


def marked(names: Callable[[str, str], list[str]]) -> list[Any]:
    """(door, launch, name), slow where the table says so."""
    return [
        pytest.param(*where, name, marks=[pytest.mark.slow] if is_slow(*where, name) else [])
        for where in LAUNCHES
        for name in names(*where)
    ]


@pytest.mark.parametrize("launch", DOORS["loopback"].launches)
@pytest.mark.parametrize("name", PROMISES)
def test_in_process(launch: str, name: str, tmp_path: Path) -> None:
    try:
        in_threads(int(launch.split("-")[1]), tmp_path, lambda door: keep(PROMISES[name], door))
    except Skip as skip:
        pytest.skip(str(skip))


@pytest.mark.parallel
@pytest.mark.timeout(SLOWEST)
@pytest.mark.parametrize("door,launch,name", marked(names_in))
def test_promise(door: str, launch: str, name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    check(f"{door} {launch}", name, outcome(door, launch, name, tmp_path_factory))


@pytest.mark.parallel
@pytest.mark.timeout(SLOWEST)
@pytest.mark.parametrize("door,launch,name", marked(cases))
def test_case(door: str, launch: str, name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    check(f"{door} {launch}", name, outcome(door, launch, name, tmp_path_factory))


@pytest.mark.parallel
@pytest.mark.timeout(SLOWEST)
@pytest.mark.parametrize("door,launch,name", marked(lambda door, _: [QUIET] if door == "mpi" else []))
def test_mpi_ranks_end_well_and_in_silence(
    door: str, launch: str, name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    _, log, status = outcome(door, launch, name, tmp_path_factory)
    assert status == 0, log[-3000:]
    assert "Traceback" not in log and "error" not in log.lower(), log[-3000:]


# -- the table itself ------------------------------------------------------------------------------------


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
