"""Take the turns of a benchmark: set hosts up, start ranks, measure one exchange after the other, take all down."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments import nets
from experiments.bench.config import Bench, Turn
from experiments.bench.ranks import Group, RankError
from experiments.cluster.hosts import Hosts
from experiments.cluster.launch import LaunchError
from experiments.cluster.rates import speed
from experiments.report import jsonl
from experiments.report.results import copy_speed

__all__ = ["TURNS", "measure", "read"]

TURNS = "turns.jsonl"  #: in the folder of a benchmark: one line per turn
ROOM = 10  # times the bytes of a set: memory that a contender may need on each rank while it is set up


def read(folder: Path) -> list[dict[str, Any]]:
    """Return the turns in a folder, the last one of each key."""
    turns = jsonl.read(folder / TURNS)
    return list({tuple(turn[key] for key in Turn.KEY): turn for turn in turns}.values())


def measure(bench: Bench, folder: Path, say: Callable[[str], object]) -> None:
    """Take every turn that has no result yet. Hosts and ranks are gone when it returns or raises.

    Args:
        bench: what to measure.
        folder: the result of each turn is appended to ``turns.jsonl`` in it.
        say: called with what happens.

    Raises:
        HostsError: the hosts cannot be set up.
        LaunchError: the ranks cannot be started.
    """
    done = [{key: turn[key] for key in Turn.KEY} for turn in read(folder) if "failed" not in turn]
    missing = [turn for turn in bench.turns() if turn.key not in done]
    for rate in dict.fromkeys(turn.rate for turn in missing):
        turns = [turn for turn in missing if turn.rate == rate]
        hosts = bench.hosts_at(rate)
        with hosts or contextlib.nullcontext():
            link = {"link": str(hosts or "shared memory (MPI), loopback TCP")}
            say(f"{link['link']}: starting ranks")
            if hosts:
                link["reached"] = ", ".join(speed(bits) for bits in hosts.measure())
            with _groups(turns, bench, hosts, folder / "log.txt") as groups:
                for turn in turns:
                    line = turn.key | link | _take(turn, bench, groups[turn.contender.where], hosts)
                    jsonl.append(folder / TURNS, line)
                    times = ", ".join(f"{one['seconds']:.3g} s" for one in line.get("exchanges", ()))
                    say(f"{turn}: {times or 'failed: ' + line['failed']}")


@contextlib.contextmanager
def _groups(turns: Sequence[Turn], bench: Bench, hosts: Hosts | None, log: Path) -> Iterator[dict[str, Group]]:
    names = dict.fromkeys(turn.contender.where for turn in turns)
    groups = {name: Group(name, bench.hosts, hosts, log, not bench.awake, bench.device) for name in names}
    with contextlib.ExitStack() as stack:
        try:
            for group in groups.values():  # one after the other: on few cores, imports of all at once time out
                stack.callback(group.stop)
                group.launch()
                group.join()
            yield groups
        except RankError as error:
            raise LaunchError(str(error)) from None


def _take(turn: Turn, bench: Bench, group: Group, hosts: Hosts | None) -> dict[str, Any]:
    """Return the figures of one turn. A failure is a result, too; the group starts again after it."""
    line = {"kind": turn.contender.kind, "copy_gb_per_s": round(copy_speed(), 2)}
    try:
        if not group.up:
            group.launch()
            group.join()
        with group.awake():
            return line | _exchanges(turn, bench, group, hosts)
    except RankError as error:
        group.stop()
        return line | {"failed": str(error)}


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
    # The ranks' waking up still disturbs the first one, sometimes by a second
    line: dict[str, Any] = {"exchanges": [_together(replies) for replies in found[1:] or found]}
    for what in ("dense", "sent", "on_wire", "calls"):
        if what in found[-1][0]:
            line[what] = sum(reply[what] for replies in found for reply in replies) / (len(found) * group.ranks)
    if hosts:
        line["interface"] = sum(a.sent - b.sent for a, b in zip(after, before, strict=True)) / len(found) / group.ranks
    return line


def _make_room(group: Group, key: str, num_bytes: int) -> None:
    """Make the ranks forget contenders until memory suffices for one more.

    The latest one goes first: turns repeat in order, so the earliest one is needed next.
    """
    import psutil

    while group.prepared and psutil.virtual_memory().available < ROOM * group.ranks * num_bytes:
        group.ask("forget", key=group.prepared.pop())
    group.prepared.append(key)


def _together(replies: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Combine the ranks' times of one exchange: from the first start to the last end; of the parts, the mean."""
    one = {"seconds": max(r["end"] for r in replies) - min(r["start"] for r in replies)}
    for what in ("encode", "decode", "blocked"):
        if what in replies[0]:
            one[what] = sum(r[what] for r in replies) / len(replies)
    return one
