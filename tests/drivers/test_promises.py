"""Every promise at every door: ``promises/`` says what is promised, ``doors/`` how each driver is asked."""

from __future__ import annotations

from pathlib import Path

import pytest
from doors.loopback import in_threads
from harness import Skip
from launching import MORE, check, outcomes
from promises import DOORS, EXCEPTIONS, PROMISES, keep
from promises.table import OWN_LAUNCH, SUBSETS, names_in, together

SCRIPT = Path(__file__).parent / "run_promises.py"
SECONDS = {"tensorflow": 540, "torch": 300, "mpi": 270}
MODULES = {"torch": ("torch", "horovod"), "tensorflow": ("tensorflow", "horovod"), "mpi": ("mpi4py",)}
THREADS = [(launch, name) for launch in DOORS["loopback"].launches for name in names_in("loopback", launch)]
LAUNCHED = [
    (door, launch, name)
    for door, entry in DOORS.items()
    if door != "loopback"
    for launch in entry.launches
    for name in names_in(door, launch)
]


@pytest.mark.parametrize("launch,name", THREADS)
def test_loopback(launch: str, name: str, tmp_path: Path) -> None:
    try:
        in_threads(int(launch.split("-")[1]), tmp_path, lambda door: keep(PROMISES[name], door))
    except Skip as skip:
        pytest.skip(str(skip))


@pytest.mark.parallel
@pytest.mark.timeout(max(SECONDS.values()) + MORE)
@pytest.mark.parametrize("door,launch,name", LAUNCHED)
def test_launched(door: str, launch: str, name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    for module in MODULES[door]:
        pytest.importorskip(module)
    own = (door, name) in OWN_LAUNCH
    names = [name] if own else together(door, launch)
    seconds = PROMISES[name].seconds + 20 if own else SECONDS[door]
    folder = tmp_path_factory.mktemp(f"{door}-{launch}")
    check(f"{door} {launch}", name, outcomes(launch, SCRIPT, folder, *names, seconds=seconds, DOOR=door))


@pytest.mark.parallel
@pytest.mark.timeout(SECONDS["mpi"] + MORE)
@pytest.mark.parametrize("launch", DOORS["mpi"].launches)
def test_mpi_ranks_end_well_and_in_silence(launch: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    pytest.importorskip("mpi4py")
    names, folder = together("mpi", launch), tmp_path_factory.mktemp(f"mpi-{launch}")
    _, log, status = outcomes(launch, SCRIPT, folder, *names, seconds=SECONDS["mpi"], DOOR="mpi")
    assert status == 0, log[-3000:]
    assert "Traceback" not in log and "error" not in log.lower(), log[-3000:]


# -- the table itself ------------------------------------------------------------------------------------


@pytest.mark.parametrize("door", DOORS)
def test_every_promise_is_tried_or_has_a_reason(door: str) -> None:
    tried = {name for launch in DOORS[door].launches for name in names_in(door, launch)}
    assert tried == set(PROMISES), f"neither tried nor excepted: {set(PROMISES) - tried}"


def test_the_table_speaks_of_what_there_is() -> None:
    for door, name in [*EXCEPTIONS, *OWN_LAUNCH]:
        assert door in DOORS and name in PROMISES, (door, name)
    for (door, launch), names in SUBSETS.items():
        assert launch in DOORS[door].launches and set(names) <= set(PROMISES), (door, launch)
        assert any((door, other) not in SUBSETS for other in DOORS[door].launches), "some launch tries all"
    assert all(entry.reason for entry in EXCEPTIONS.values())
    assert all(one.text.endswith((".", ";")) for one in PROMISES.values()), "a promise is a sentence"
