"""Take the turns of a benchmark: set hosts up, start ranks, measure one exchange after the other, take all down."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments import nets
from experiments.bench.config import LOOPBACK, Bench, Turn, read_turns
from experiments.bench.devices import Cpu
from experiments.bench.ranks import Group, RankError
from experiments.cluster import launcher
from experiments.cluster.hosts import Hosts
from experiments.cluster.rates import speed
from experiments.output import jsonl

COPIED = 25_000_000  # float32 values, 100 MB: what a turn's times are compared with on another machine
ROOM = 10  # times a set's bytes: what a contender may take in each rank while it is set up


def measure(
    bench: Bench,
    folder: Path,
    loopback: bool,
    say: Callable[[str, dict[str, Any] | None], None],
    note: Callable[[dict[str, Any]], None],
) -> None:
    """Take every turn that has no result yet. Hosts and ranks are gone when it returns or raises.

    Args:
        bench: what to measure.
        folder: each turn's result is appended to ``results.jsonl`` in it.
        loopback: measure without emulated hosts.
        say: called with a turn's name before it, and with its name and result after it.
        note: called for each link with {"rate", "link", "reached"}.

    Raises:
        HostsError: the hosts cannot be set up.
        LaunchError: the ranks cannot be started.
    """
    done = {(t["rate"], t["set"], t["contender"], t["round"]) for t in read_turns(folder) if "failed" not in t}
    for rate in [LOOPBACK] if loopback else bench.rates:
        turns = [turn for turn in bench.turns([rate]) if turn.key not in done]
        if not turns:
            continue
        hosts = None if loopback else bench.hosts_at(rate)
        with hosts or contextlib.nullcontext():
            link: dict[str, Any] = {"rate": rate, "link": str(hosts or "shared memory (MPI), loopback TCP")}
            say(f"{link['link']}: starting ranks", None)
            if hosts:
                link["reached"] = [speed(bits) for bits in hosts.measure()]
            note(link)
            with _groups(turns, bench, hosts, folder / "log.txt") as groups:
                for turn in turns:
                    say(str(turn), None)
                    result = _take(turn, bench, groups[turn.contender.where], hosts)
                    jsonl.append(folder / "results.jsonl", result)
                    say(str(turn), result)


@contextlib.contextmanager
def _groups(turns: Sequence[Turn], bench: Bench, hosts: Hosts | None, log: Path) -> Iterator[dict[str, Group]]:
    names = dict.fromkeys(turn.contender.where for turn in turns)
    groups = {name: Group(name, bench.hosts, hosts, log, not bench.awake, bench.device) for name in names}
    with contextlib.ExitStack() as stack:
        try:
            for group in groups.values():  # one by one: they would be in each other's way
                stack.callback(group.stop)
                group.launch()
                group.join()
            yield groups
        except RankError as error:
            raise launcher.LaunchError(str(error)) from None


def _take(turn: Turn, bench: Bench, group: Group, hosts: Hosts | None) -> dict[str, Any]:
    """One turn's line in ``results.jsonl``; a failure is one, too, and the group begins again after it."""
    line: dict[str, Any] = dict(zip(("rate", "set", "contender", "round"), turn.key, strict=True))
    line |= {"at": time.strftime("%Y-%m-%dT%H:%M:%S"), "copy": copy_seconds()}
    try:
        if not group.up:
            group.launch()
            group.join()
        with group.awake():
            return line | _exchanges(turn, bench, group, hosts)
    except RankError as error:
        group.stop()
        return line | {"failed": str(error)}


def copy_seconds() -> float:
    """Seconds that one core takes to copy 100 MB now, the median of three: what this machine's memory allows."""
    host = Cpu()
    x, to = host.empty(COPIED), host.empty(COPIED)
    return statistics.median(host.timed(host.copy, to, x)[1].seconds for _ in range(3))


def _exchanges(turn: Turn, bench: Bench, group: Group, hosts: Hosts | None) -> dict[str, Any]:
    key = f"{turn.set.label}.{turn.contender.label}".replace(" ", "_")
    given = {**turn.set.model_dump(), "tensors": turn.set.tensors()}
    num_bytes = 4 * nets.total(given["tensors"])
    group.be_patient(num_bytes)
    if key not in group.prepared:
        _make_room(group, key, num_bytes)
    group.ask("prepare", key=key, set=given, contender=turn.contender.spec)
    before = hosts.traffic() if hosts else []
    found: list[list[dict[str, Any]]] = []
    began = time.monotonic()
    while not found or (len(found) < bench.repeats and time.monotonic() < began + bench.seconds):
        found.append(group.ask("measure", key=key))
    after = hosts.traffic() if hosts else []
    if len({reply["checksum"] for reply in group.ask("check", key=key)}) > 1:
        raise RankError("ranks ended with different gradients")
    # the first one is still disturbed by the ranks' waking up: by a second, now and then
    line: dict[str, Any] = {"exchanges": [_together(replies) for replies in found[1:] or found]}
    for what in ("dense", "sent", "on_wire", "calls"):
        if what in found[-1][0]:
            line[what] = sum(reply[what] for replies in found for reply in replies) / (len(found) * len(found[0]))
    if hosts:
        line["interface"] = [(a.sent - b.sent) / len(found) for a, b in zip(after, before, strict=True)]
    return line


def _make_room(group: Group, key: str, num_bytes: int) -> None:
    """Make the ranks forget contenders while memory is short for one more, with a set of so many bytes.

    The latest go first: turns repeat in order, so the earliest is needed next.
    """
    import psutil

    while group.prepared and psutil.virtual_memory().available < ROOM * group.ranks * num_bytes:
        group.ask("forget", key=group.prepared.pop())
    group.prepared.append(key)


def _together(replies: Sequence[dict[str, Any]]) -> dict[str, float]:
    """One exchange: from the first rank's start to the last one's end; what the ranks were busy with, on average."""
    one = {"seconds": max(r["end"] for r in replies) - min(r["start"] for r in replies)}
    for what in ("encode", "decode", "blocked"):
        if what in replies[0]:
            one[what] = sum(r[what] for r in replies) / len(replies)
    return one
