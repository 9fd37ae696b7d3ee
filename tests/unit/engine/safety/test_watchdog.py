"""The watchdog: what it reports about missing ranks, when it ends the process, and when it stays silent."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from hvdcompress.engine.safety import peers, watchdog
from hvdcompress.engine.safety.watchdog import (
    FIRST_STEP_FACTOR,
    LIVENESS_INTERVAL,
    MAX_REFUSALS,
    TICK,
    Progress,
    Watchdog,
)
from hvdcompress.plan import plan_of

PLAN = plan_of("none")
WAITING = Progress(7, "tensor 'w'")
OUTSIDE = Progress(7, None)
TICKS_PER_QUESTION = round(LIVENESS_INTERVAL / TICK)  #: ticks between two checks whether all ranks are alive
check = Watchdog.check  #: called by the tests, and not by the watchdog's thread


class Exited(Exception):
    """Raised instead of ending the process."""


@pytest.fixture(autouse=True)
def errors(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Lines printed before the process ends. The watchdog's thread answers questions, and checks no step."""
    lines: list[str] = []

    def end(status: int) -> None:
        raise Exited(status)

    monkeypatch.setattr(Watchdog, "check", lambda self: None)
    monkeypatch.setattr(watchdog, "print_error", lines.append)
    monkeypatch.setattr(watchdog.os, "_exit", end)
    monkeypatch.setattr(watchdog, "GRACE_PERIOD", 0.0)
    service = watchdog._get_service()
    yield lines
    service.watched.clear()


def make(progress: Progress | None, rank: int = 0, world_size: int = 2, **settings: Any) -> Watchdog:
    """Return the watchdog of a rank whose progress never changes."""
    return Watchdog(rank, world_size, replace(PLAN, **settings), lambda: progress)


def make_ranks(*progresses: Progress | None, **settings: Any) -> list[Watchdog]:
    """Return the watchdogs of ranks that know each other. A rank whose progress is None never answers."""
    ranks = [make(each or OUTSIDE, rank, len(progresses), **settings) for rank, each in enumerate(progresses)]
    endpoints = [json.loads(rank.endpoint()) for rank in ranks]
    for endpoint, progress in zip(endpoints, progresses, strict=True):
        endpoint["number"] = endpoint["number"] if progress else -1
    for rank in ranks:
        rank.set_peers([json.dumps(endpoint) for endpoint in endpoints])
    return ranks


def end_process(rank: Watchdog, number: int, host: str) -> None:
    """Replace the endpoint of a peer by one at which nobody listens any more."""
    with socket.create_server((host, 0)) as closed:
        rank._peers[number] |= {"host": host, "port": closed.getsockname()[1]}


def without_hosts(text: str) -> str:
    """Return the text without the hosts of ranks, which depend on this machine's interfaces."""
    return re.sub(r"(rank \d+) on \S+ \(\S+\)", r"\1", text)


def test_it_warns_again_when_the_time_has_doubled_and_then_ends(
    errors: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    where = "tensor 'w' (method topk, round 0)"
    everyone = (Progress(7, where), None, Progress(6, "the ranks' status"), OUTSIDE, Progress(7, where))
    first, *_others = make_ranks(*everyone, warn_after=TICK, end_after=4 * TICK)
    check(first)
    assert not caplog.messages
    for _ in range(3):
        check(first)
    with pytest.raises(Exited):
        check(first)
    assert len(caplog.messages) == 2 and len(errors) == 1
    for text in (*caplog.messages, *errors):
        assert f"step 7 for {where}" in text
        missing = without_hosts(text.split("missing: ")[1])
        assert "rank 1 does not answer" in missing
        assert "rank 2 is in step 6 and waits for the ranks' status" in missing
        assert "rank 3 is outside of a step, after 7" in missing
        assert "(rank 4 waits for tensor 'w'" in missing
    assert "continues to wait until 2 s" in caplog.messages[0]
    assert "rank 0 has waited 2 s" in errors[0] and "This rank ends: `end_after` in the plan is 2 s" in errors[0]


def test_a_rank_that_is_asked_to_end_reports_and_ends(errors: list[str]) -> None:
    first, other = make_ranks(WAITING, Progress(5, None))
    first.all_progress()
    check(other)
    first.all_progress(ends=True)
    with pytest.raises(Exited):
        check(other)
    assert "rank 1 is outside of a step, after 5 steps, while rank 0 waits" in errors[0]
    assert "missing: rank 1 is outside" in without_hosts(errors[0]) and "rank 0 has asked all ranks to end" in errors[0]


def test_it_stays_silent_while_steps_make_progress_or_none_is_open(
    errors: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    plan = replace(PLAN, warn_after=TICK, end_after=2 * TICK)
    counts = iter(range(100))
    moving = Watchdog(0, 2, plan, lambda: WAITING._replace(counts=(next(counts),)))
    resting = Watchdog(0, 2, plan, lambda: OUTSIDE)
    for _ in range(10):
        check(moving)
        check(resting)
    assert not errors and not caplog.messages


def test_a_rendezvous_names_the_ranks_that_have_not_arrived(
    errors: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    rank = make(Progress(0, None), world_size=3, warn_after=2 * TICK, end_after=9 * TICK)
    check(rank)
    with rank.rendezvous("every rank's first backward pass", lambda: [0, 2]):
        for _ in range(8):
            check(rank)
        assert "rank 0 has waited 1 s in step 0 for every rank's first backward pass" in caplog.messages[0]
        assert "missing: rank 1 has not arrived" in caplog.messages[0] and not errors
        with pytest.raises(Exited):
            check(rank)
    for _ in range(30):  # all ranks have arrived
        check(rank)
    assert len(errors) == 1 and "This rank ends" in errors[0]


def test_by_default_ten_minutes_of_waiting_end_no_rank(errors: list[str], caplog: pytest.LogCaptureFixture) -> None:
    """Another rank may save its state for that long."""
    rank = make(WAITING)
    for _ in range(round(600 / TICK)):
        check(rank)
    assert not errors
    assert [re.findall(r"has waited (\d+) s", text) for text in caplog.messages] == [["120"], ["240"], ["480"]]


def test_a_rank_that_has_ended_is_noticed_and_named(errors: list[str]) -> None:
    first, other, last = make_ranks(WAITING, WAITING, OUTSIDE)
    check(first)  # asks which ranks can be reached
    end_process(first, 2, "127.0.0.2")
    for _ in range(MAX_REFUSALS * TICKS_PER_QUESTION - 1):
        check(first)
    assert not errors
    with pytest.raises(Exited):
        check(first)
    name = f"rank 2 on {socket.gethostname()} (127.0.0.2)"
    assert f"missing: {name} has ended (rank 1 waits for tensor 'w')" in errors[0]
    assert "This rank ends: the step cannot complete without them" in errors[0]
    assert other.asked_by == 0 and last.asked_by is None


@pytest.mark.parametrize(
    "host,ends",
    [
        (peers.LOCALHOST, True),  # on this host only an ended process refuses connections
        ("127.0.0.2", False),  # a firewall may refuse connections to another host
    ],
)
def test_a_rank_that_never_answered_has_ended_only_on_this_host(host: str, ends: bool) -> None:
    first, _other = make_ranks(WAITING, OUTSIDE)
    end_process(first, 1, host)
    with pytest.raises(Exited) if ends else contextlib.nullcontext():
        for _ in range(MAX_REFUSALS * TICKS_PER_QUESTION + 1):
            check(first)


@pytest.mark.parametrize(
    "progress,elastic",
    [
        (Progress(0, "tensor 'w'", first=True), False),  # another rank may be done while this one still compiles
        (WAITING, True),  # an elastic launcher replaces the rank that has ended
    ],
)
def test_an_ended_rank_may_be_no_reason_to_end(
    progress: Progress, elastic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVOD_ELASTIC", str(int(elastic)))
    first, _other = make_ranks(progress, OUTSIDE)
    check(first)
    end_process(first, 1, "127.0.0.2")
    for _ in range(MAX_REFUSALS * FIRST_STEP_FACTOR * TICKS_PER_QUESTION - 1):
        check(first)
    if not elastic:
        with pytest.raises(Exited):
            check(first)


def test_it_stops_watching_when_the_group_of_ranks_is_replaced(errors: list[str]) -> None:
    """In Horovod's elastic mode, an open step stays open in a Compressor that nobody uses any more."""
    places = iter([WAITING, None, *[WAITING] * 9])
    over = Watchdog(0, 2, replace(PLAN, end_after=2 * TICK), lambda: next(places))
    check(over)
    for _ in range(9):
        with pytest.raises(LookupError):
            check(over)
    assert not errors


@pytest.mark.parametrize("world_size,on", [(1, True), (2, False)])
def test_one_rank_or_a_disabled_watchdog_opens_no_socket(
    world_size: int, on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "_get_service", lambda: pytest.fail("it opens a socket"))
    rank = make(OUTSIDE, world_size=world_size, watchdog=on)
    with rank.rendezvous("every rank"):
        assert not rank.on and json.loads(rank.endpoint()) == {}


@pytest.mark.parametrize("question", [[], 3, {}, {"number": -1}, {"number": [], "rank": 0, "ends": True}])
def test_malformed_questions_get_no_answer(question: Any) -> None:
    (rank, _other) = make_ranks(WAITING, WAITING)
    with pytest.raises(ConnectionError):
        peers.query(rank._peers[0], question)
    assert rank.asked_by is None
