"""The watchdog: what it says of ranks that wait, are elsewhere or are silent; whom it answers; when it keeps still."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from hvdcompress.engine import watchdog
from hvdcompress.engine.watchdog import FIRST, TICK, Place, Watchdog


class Exited(Exception):
    """In the place of the process's end."""


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []

    def end(status: int) -> None:
        raise Exited(status)

    monkeypatch.setattr(watchdog, "say", found.append)
    monkeypatch.setattr(watchdog.os, "_exit", end)
    monkeypatch.setattr(watchdog, "ASKING", 0.5)
    return found


def ranks(*places: Place | None, timeout: float = 3 * TICK) -> list[Watchdog]:
    """Watchdogs that know each other, at these places; the thread does not look at them. One of None never answers."""
    made = [Watchdog(r, len(places), timeout, lambda p=p: p or Place(0, None), lambda: 0) for r, p in enumerate(places)]
    service = watchdog._service()
    addresses = []
    for number, one in enumerate(made):
        key = 1_000_000 + id(one) + number
        held[key] = one
        addresses.append(json.dumps({**service.address, "number": key if places[number] else -1}))
    for one in made:
        one.meet(addresses)
    return made


held: dict[int, Watchdog] = {}


@pytest.fixture(autouse=True)
def answered(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The service answers for these, and looks at none."""
    monkeypatch.setattr(watchdog._service(), "watched", held)
    monkeypatch.setattr(Watchdog, "look", lambda self: None)
    yield
    held.clear()


LOOK = Watchdog.look  #: what the thread does


def test_it_names_the_tensor_and_the_ranks_that_are_missing(said: list[str]) -> None:
    where = "tensor 'w' (method topk, round 0)"
    one, *_ = ranks(Place(7, where), None, Place(6, "the ranks' status"), Place(7, None), Place(7, where))
    LOOK(one)
    LOOK(one)
    LOOK(one)
    assert not said
    with pytest.raises(Exited):
        LOOK(one)
    (text,) = said
    assert "rank 0 has waited 2 s in step 7 for tensor 'w' (method topk, round 0)" in text
    missing = text.split("missing: ")[1]
    assert "rank 1 does not answer" in missing
    assert "rank 2 is in step 6, and waits for the ranks' status" in missing
    assert "rank 3 is outside of a step, after 7" in missing
    assert "(rank 4 waits for tensor 'w'" in missing


def test_a_rank_that_is_asked_reports_and_ends_too(said: list[str]) -> None:
    one, other = ranks(Place(7, "tensor 'w'"), Place(5, None))
    LOOK(other)
    one.everyones_place()
    assert other.asked_by == 0
    with pytest.raises(Exited):
        LOOK(other)
    assert "rank 1 is outside of a step, after 5, and rank 0 waits in vain" in said[0]
    assert "missing: rank 1 is outside" in said[0]


def test_a_step_that_moves_or_none_at_all_is_left_alone(said: list[str]) -> None:
    pulse = iter(range(100))
    moving = Watchdog(0, 2, 2 * TICK, lambda: Place(1, "tensor 'w'"), lambda: next(pulse))
    resting = Watchdog(0, 2, 2 * TICK, lambda: Place(1, None), lambda: 0)
    for _ in range(10):
        LOOK(moving)
        LOOK(resting)
    assert not said


def test_where_ranks_meet_it_says_so_and_has_patience(said: list[str]) -> None:
    one = Watchdog(0, 3, 2 * TICK, lambda: Place(0, None), lambda: 0)
    LOOK(one)
    with one.meeting("every rank's first backward pass", lambda: [0, 2]):
        for _ in range(2 * FIRST - 1):
            LOOK(one)
        assert len(said) == 1 and "rank 0 has waited 1 s in step 0 for every rank's first backward pass" in said[0]
        assert "missing: rank 1 has not come" in said[0] and "This rank ends" not in said[0], said
        with pytest.raises(Exited):
            LOOK(one)
        assert len(said) == 2 and "This rank ends" in said[1]
    for _ in range(3 * FIRST):  # they have met
        LOOK(one)
    assert len(said) == 2


def test_in_the_first_step_it_asks_and_ends_nobody(said: list[str]) -> None:
    """A rank may still load its data, though all have met."""
    one, other = ranks(Place(0, "tensor 'w'", first=True), Place(0, None, first=True), timeout=2 * TICK)
    for _ in range(2 * FIRST):
        LOOK(one)
        LOOK(other)
    assert len(said) == 1 and "missing: rank 1 is outside of a step, after 0" in said[0], said
    assert "waits on, and ends after" in said[0] and other.asked_by is None
    with pytest.raises(Exited):
        LOOK(one)
    assert other.asked_by == 0


def test_one_whose_ranks_are_no_more_is_left_alone(said: list[str]) -> None:
    """Horovod's elastic mode has begun again: a step that was under way stays so, in a Compressor that nobody uses."""
    places = iter([Place(7, "tensor 'w'"), None, *[Place(7, "tensor 'w'")] * 9])
    one = Watchdog(0, 2, 2 * TICK, lambda: next(places), lambda: 0)
    for _ in range(10):
        LOOK(one)
    assert not said
    with pytest.raises(LookupError):
        one.place()


def test_without_a_timeout_or_peers_there_is_none() -> None:
    for world, timeout in ((1, 120.0), (2, 0.0)):
        one = Watchdog(0, world, timeout, lambda: Place(0, None), lambda: 0)
        assert not one.on and json.loads(one.address()) == {}


def test_a_stranger_is_told_nothing(said: list[str]) -> None:
    (one,) = ranks(Place(7, "tensor 'w'"))
    address = json.loads(json.dumps(one._peers[0]))
    with pytest.raises(OSError):
        watchdog._ask({**address, "secret": "guessed"}, 1)
    for words in (b"\n", b"[]\n", b'{"proof": 3}\n', b"\xff" * 99999):
        with socket.create_connection(("127.0.0.1", address["port"]), 2) as line, line.makefile("rb") as file:
            line.settimeout(5)
            file.readline()
            line.sendall(words)
            try:
                assert file.readline() == b""
            except ConnectionResetError:
                pass
    assert one.asked_by is None
    assert watchdog._ask(address, 1) == Place(7, "tensor 'w'", 0.0) and one.asked_by == 1
