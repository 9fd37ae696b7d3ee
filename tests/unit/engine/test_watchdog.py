"""The watchdog: what it says of ranks that wait, are elsewhere or are silent; whom it answers; when it keeps still."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest

from hvdcompress.engine.safety import peers, watchdog
from hvdcompress.engine.safety.watchdog import (
    FIRST_STEP_FACTOR,
    LIVENESS_INTERVAL,
    MAX_REFUSALS,
    TICK,
    Limits,
    Progress,
    Watchdog,
)

WHERE = "tensor 'w' (method topk, round 0)"
ASKED = round(LIVENESS_INTERVAL / TICK)  #: looks from one question, whether all are alive, to the next


class Exited(Exception):
    """In the place of the process's end."""


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was said before the process's end."""
    found: list[str] = []

    def end(status: int) -> None:
        raise Exited(status)

    monkeypatch.setattr(watchdog, "print_error", found.append)
    monkeypatch.setattr(watchdog.os, "_exit", end)
    monkeypatch.setattr(watchdog, "GRACE_PERIOD", 0.0)
    return found


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """What was logged as a warning."""

    class Texts(list[str]):
        def __iter__(self) -> Iterator[str]:
            return iter([record.getMessage() for record in caplog.records if record.levelno == logging.WARNING])

        def __len__(self) -> int:
            return len(list(iter(self)))

    yield Texts()


def one(place: Progress | None, rank: int = 0, world_size: int = 2, **limits: Any) -> Watchdog:
    """A watchdog of a rank that stays at a place."""
    return Watchdog(rank, world_size, lambda: place, lambda: 0, Limits(**limits))


def ranks(*places: Progress | None, **limits: Any) -> list[Watchdog]:
    """Watchdogs that know each other, at these places; the thread does not look at them. One of None never answers."""
    made = [one(place or Progress(0, None), rank, len(places), **limits) for rank, place in enumerate(places)]
    service = watchdog._get_service()
    addresses = []
    for number, each in enumerate(made):
        key = 1_000_000 + id(each) + number
        held[key] = each
        addresses.append(json.dumps({**service.server.endpoint, "number": key if places[number] else -1}))
    for each in made:
        each.set_peers(addresses)
    return made


held: dict[int, Watchdog] = {}


def without_hosts(text: str) -> str:
    """The text without the hosts of ranks, which depend on this machine's interfaces."""
    return re.sub(r"(rank \d+) on \S+ \(\S+\)", r"\1", text)


LOOK = Watchdog.check  #: what the thread does


@pytest.fixture(autouse=True)
def completed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The service answers for these, and looks at none."""
    monkeypatch.setattr(watchdog._get_service(), "watched", held)
    monkeypatch.setattr(Watchdog, "check", lambda self: None)
    yield
    held.clear()


def text_of(texts: list[str]) -> str:
    (text,) = texts
    return text


def test_it_names_the_tensor_and_the_ranks_that_are_missing(said: list[str], warned: list[str]) -> None:
    places = (Progress(7, WHERE), None, Progress(6, "the ranks' status"), Progress(7, None), Progress(7, WHERE))
    first, *_ = ranks(*places, warn_after=TICK, end_after=4 * TICK)
    LOOK(first)
    assert not warned
    for _ in range(3):
        LOOK(first)
    with pytest.raises(Exited):
        LOOK(first)
    texts = [*warned, text_of(said)]
    assert len(texts) == 3, "once, once more when the seconds have doubled, and at the end"
    for text in texts:
        assert "step 7 for tensor 'w' (method topk, round 0)" in text
        missing = without_hosts(text.split("missing: ")[1])
        assert "rank 1 does not answer" in missing
        assert "rank 2 is in step 6 and waits for the ranks' status" in missing
        assert "rank 3 is outside of a step, after 7" in missing
        assert "(rank 4 waits for tensor 'w'" in missing
    assert "continues to wait until 2 s" in texts[0]
    assert "rank 0 has waited 2 s" in texts[-1] and "This rank ends: `end_after` in the plan is 2 s" in texts[-1]


def test_a_rank_that_is_asked_reports_and_ends_too(said: list[str]) -> None:
    first, other = ranks(Progress(7, "tensor 'w'"), Progress(5, None))
    first.all_progress()
    LOOK(other)
    first.all_progress(ends=True)
    assert other.asked_by == 0
    with pytest.raises(Exited):
        LOOK(other)
    assert "rank 1 is outside of a step, after 5 steps, while rank 0 waits" in said[0]
    assert "missing: rank 1 is outside" in without_hosts(said[0]) and "rank 0 has asked all ranks to end" in said[0]


def test_a_step_that_moves_or_none_at_all_is_left_alone(said: list[str], warned: list[str]) -> None:
    pulse = iter(range(100))
    moving = Watchdog(
        0, 2, lambda: Progress(1, "tensor 'w'"), lambda: next(pulse), Limits(warn_after=TICK, end_after=2 * TICK)
    )
    resting = one(Progress(1, None), warn_after=TICK, end_after=2 * TICK)
    for _ in range(10):
        LOOK(moving)
        LOOK(resting)
    assert not said and not warned


def test_where_ranks_meet_it_says_who_has_not_come(said: list[str], warned: list[str]) -> None:
    waiting = one(Progress(0, None), world_size=3, warn_after=2 * TICK, end_after=9 * TICK)
    LOOK(waiting)
    with waiting.rendezvous("every rank's first backward pass", lambda: [0, 2]):
        for _ in range(8):
            LOOK(waiting)
        assert "rank 0 has waited 1 s in step 0 for every rank's first backward pass" in list(warned)[0]
        assert "missing: rank 1 has not arrived" in list(warned)[0] and not said
        with pytest.raises(Exited):
            LOOK(waiting)
        assert "This rank ends" in text_of(said)
    for _ in range(30):  # they have met
        LOOK(waiting)
    assert len(said) == 1


def test_a_long_evaluation_ends_nobody_by_default(said: list[str], warned: list[str]) -> None:
    """Rank 1 saves for ten minutes: those that wait say so, and wait."""
    first, other = ranks(Progress(7, "tensor 'w'"), Progress(7, None))
    for each in (first, other):
        each._asked_once = True
        for _ in range(round(600 / TICK)):
            each._asks_at = 1e9  # whether others are alive: another test's
            LOOK(each)
    assert not said and [text.split(" s in")[0] for text in warned] == [
        f"rank 0 has waited {seconds}" for seconds in (120, 240, 480)
    ]


def gone(address: dict[str, Any], host: str = "127.0.0.2") -> dict[str, Any]:
    """The address of a process that is no more."""
    with socket.create_server((host, 0)) as closed:
        return {**address, "host": host, "port": closed.getsockname()[1]}


def test_a_rank_that_has_ended_is_noticed_in_seconds(said: list[str]) -> None:
    first, other, last = ranks(Progress(7, "tensor 'w'"), Progress(7, "tensor 'w'"), Progress(7, None))
    LOOK(first)  # asks who can be reached
    first._peers[2] = gone(first._peers[2])
    for _ in range(MAX_REFUSALS * ASKED - 1):
        LOOK(first)
    assert not said
    with pytest.raises(Exited):
        LOOK(first)
    name = f"rank 2 on {socket.gethostname()} (127.0.0.2)"
    assert f"missing: {name} has ended (rank 1 waits for tensor 'w')" in text_of(said) and other.asked_by == 0
    assert "This rank ends: the step cannot complete without them" in text_of(said) and last.asked_by is None


def test_on_this_host_nobody_else_refuses(said: list[str]) -> None:
    """A rank that has ended before it was asked for the first time."""
    first, _ = ranks(Progress(7, "tensor 'w'"), Progress(7, None))
    first._peers[1] = gone(first._peers[1], peers.LOCALHOST)
    with pytest.raises(Exited):
        for _ in range(MAX_REFUSALS * ASKED + 1):
            LOOK(first)
    assert "missing: rank 1 has ended" in text_of(said)


def test_one_that_never_answered_may_be_behind_a_firewall(said: list[str]) -> None:
    first, _ = ranks(Progress(7, "tensor 'w'"), Progress(7, None))
    first._peers[1] = gone(first._peers[1])
    for _ in range(5 * ASKED):
        LOOK(first)
    assert not said


@pytest.mark.parametrize(
    "place,limits", [(Progress(0, "tensor 'w'", first=True), {}), (Progress(7, "w"), {"elastic": True})]
)
def test_a_rank_that_has_ended_is_no_verdict(place: Progress, limits: dict[str, Any], said: list[str]) -> None:
    """In the first step it may be done, while this one compiles; an elastic launcher replaces it."""
    first, _ = ranks(place, Progress(1, None), **limits)
    LOOK(first)
    first._peers[1] = gone(first._peers[1])
    for _ in range(MAX_REFUSALS * FIRST_STEP_FACTOR * ASKED - 1):
        LOOK(first)
    assert not said
    if not limits:
        with pytest.raises(Exited):
            LOOK(first)


def test_one_whose_ranks_are_no_more_is_left_alone(said: list[str]) -> None:
    """Horovod's elastic mode has begun again: a step that was under way stays so, in a Compressor that nobody uses."""
    places = iter([Progress(7, "tensor 'w'"), None, *[Progress(7, "tensor 'w'")] * 9])
    over = Watchdog(0, 2, lambda: next(places), lambda: 0, Limits(end_after=2 * TICK))
    for _ in range(10):
        LOOK(over)
    assert not said
    with pytest.raises(LookupError):
        over.progress()


def test_without_peers_or_a_wish_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_get_service", lambda: pytest.fail("it opens a socket"))
    for world_size, on in ((1, True), (2, False)):
        none = one(Progress(0, None), world_size=world_size, on=on)
        with none.rendezvous("every rank"):
            assert not none.on and json.loads(none.endpoint()) == {}


def test_a_stranger_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "MESSAGE_TIMEOUT", 0.5)
    (first,) = ranks(Progress(7, "tensor 'w'"))
    address = first._peers[0]
    question = {"number": address["number"], "rank": 1, "ends": True}
    with pytest.raises(peers.Unreachable):
        peers.query({**address, "secret": "guessed"}, question)
    for words in (b"\n", b"[]\n", b'{"proof": 3}\n', b"\xff" * 99999):
        with socket.create_connection((address["host"], address["port"]), 2) as line:
            line.settimeout(5)
            line.sendall(words)
            while said_back := line.recv(4096) if _is_open(line) else b"":
                assert b"tensor" not in said_back
    assert first.asked_by is None
    assert Progress(*peers.query(address, question)) == Progress(7, "tensor 'w'", 0.0) and first.asked_by == 1


def _is_open(line: socket.socket) -> bool:
    try:
        return bool(line.recv(1, socket.MSG_PEEK))
    except ConnectionResetError:
        return False


@pytest.mark.parametrize("question", [[], 3, {}, {"number": -1}, {"number": [], "rank": 0, "ends": True}])
def test_a_question_that_makes_no_sense_is_not_answered(question: Any) -> None:
    (first,) = ranks(Progress(7, "tensor 'w'"))
    with pytest.raises(peers.Unreachable):
        peers.query(first._peers[0], question)
    assert first.asked_by is None


def test_a_silent_stranger_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many of them, too; and their connections are closed after a while."""
    monkeypatch.setattr(peers, "MESSAGE_TIMEOUT", 1.0)
    (first,) = ranks(Progress(7, "tensor 'w'"))
    there = first._peers[0]["host"], first._peers[0]["port"]
    silent = [socket.create_connection(there, 2) for _ in range(20)]
    try:
        began = time.monotonic()
        assert first.all_progress() == [Progress(7, "tensor 'w'", 0.0)]
        question = {"number": first._peers[0]["number"], "rank": 0, "ends": False}
        assert Progress(*peers.query(first._peers[0], question)) == Progress(7, "tensor 'w'", 0.0)
        assert time.monotonic() - began < 1
        for line in silent:
            line.settimeout(10)
            while line.recv(4096):
                pass
    finally:
        for line in silent:
            line.close()


def test_one_that_is_stopped_is_asked_in_vain_and_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system takes the connection in its place."""
    monkeypatch.setattr(peers, "MESSAGE_TIMEOUT", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        address = {"host": "127.0.0.1", "port": stopped.getsockname()[1], "secret": "s"}
        with pytest.raises(peers.Unreachable) as error:
            peers.query(address, {})
    assert not error.value.refused


def test_who_has_closed_refuses_and_a_fork_keeps_no_socket() -> None:
    answering = peers.AnswerServer(lambda question: question)
    assert peers.query(answering.endpoint, {"number": 3}) == {"number": 3}
    kept = peers.AnswerServer(lambda question: question)
    if (child := os.fork()) == 0:
        answering.close_in_child()
        time.sleep(20)
        os._exit(0)
    try:
        answering.close()
        for _ in range(100):  # the fork leaves it soon
            with pytest.raises(peers.Unreachable) as error:
                peers.query(answering.endpoint, {})
            if error.value.refused:
                break
            time.sleep(0.1)
        assert error.value.refused and peers.query(kept.endpoint, {}) == {}
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        kept.close()


def test_the_own_address_is_that_of_the_way_to_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*peers.MASTER_VARIABLES, *(name for pair in peers.SIZE_VARIABLES for name in pair)]:
        monkeypatch.delenv(name, raising=False)
    here = peers.own_address()
    assert socket.getaddrinfo(here, 1)
    monkeypatch.setenv("MASTER_ADDR", here)
    assert peers.own_address() == here
    monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")
    monkeypatch.setenv("OMPI_MCA_orte_hnp_uri", f"1.0;tcp://127.0.0.1,{here}:4711;tcp6://[fd00::2]:4712")
    assert peers.own_address() == here
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert peers.own_address() == here
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert peers.own_address() == "127.0.0.1"


def test_messages_are_not_pickles(monkeypatch: pytest.MonkeyPatch) -> None:
    """``Connection.recv`` runs whatever it is sent."""
    monkeypatch.setattr(Connection, "recv", lambda self: pytest.fail("it unpickles"))
    (first,) = ranks(Progress(7, "tensor 'w'"))
    question = {"number": first._peers[0]["number"], "rank": 0, "ends": False}
    assert Progress(*peers.query(first._peers[0], question)).steps == 7
