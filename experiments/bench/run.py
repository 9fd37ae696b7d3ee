"""``python -m experiments bench``: take the turns of a benchmark, and make JSON, tables and a picture of them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments import nets
from experiments.bench import report
from experiments.bench.config import LOOPBACK, NOOP, Bench, Turn
from experiments.bench.ranks import Group, RankError
from experiments.cluster.hosts import Hosts
from experiments.cluster.launch import stoppable
from experiments.report import plots, results

TURNS = "turns.jsonl"  #: in the folder of a benchmark: one line per turn


def prepare(folder: Path, bench: Bench) -> None:
    """Make a benchmark's folder ready; turns of an earlier attempt stay.

    Args:
        folder: a new or empty one, or that of the earlier attempt.
        bench: what is to be measured; its configuration is written there.

    Raises:
        ValueError: turns were taken with another configuration.
    """
    config = folder / "config.yaml"
    if config.exists():
        before, now = Bench.open(config).model_dump(), bench.model_dump()
        if changed := [key for key in now if now[key] != before[key]]:
            raise ValueError(f"{folder} was measured with another {', '.join(changed)}: give another --out")
    folder.mkdir(parents=True, exist_ok=True)
    bench.save(config)


def run(bench: Bench, folder: Path) -> int:
    """Measure what is missing, print the tables, and write ``bench-NAME.json`` and a picture.

    Returns:
        The exit status: 0; 1 if a turn failed.
    """
    with stoppable():
        measure(bench, folder)
    turns = read(folder)
    records = report.summarize(turns)
    if not records.empty:
        report.show(records)
        links = {turn["rate"]: turn["link"] for turn in turns}
        sets = {one.label: str(one) for one in bench.sets}
        conditions = "others awake, ranks on any core" if bench.awake else "others stopped, ranks pinned"
        about = {"hosts": bench.hosts, "ranks_per_host": bench.ranks_per_host, "conditions": conditions}
        written = results.save(f"bench-{bench.name}", records, folder, **about, sets=sets, links=links)
        print(f"written: {written}, {plots.save(report.speed_ups(records), written.with_suffix('.svg'))}")
    failed = [turn for turn in turns if "failed" in turn]
    for turn in failed:
        print(f"{turn['contender']} on {turn['set']} at {turn['rate']}: {turn['failed']}")
    return int(bool(failed))


def read(folder: Path) -> list[dict[str, Any]]:
    """Return the turns in a folder, the last one of each key."""
    return list(
        {tuple(turn[key] for key in Turn._fields): turn for turn in results.read_lines(folder / TURNS)}.values()
    )


def measure(bench: Bench, folder: Path) -> None:
    """Take every turn that has no result yet. Hosts and ranks are gone when it returns or raises.

    Args:
        bench: what to measure.
        folder: the result of each turn is appended to ``turns.jsonl`` in it.

    Raises:
        HostsError: the hosts cannot be set up.
        LaunchError: the ranks cannot be started.
    """
    done = [{key: turn[key] for key in Turn._fields} for turn in read(folder) if "failed" not in turn]
    missing = [turn for turn in bench.turns() if turn.key not in done]
    for rate in dict.fromkeys(turn.rate for turn in missing):
        with contextlib.ExitStack() as stack:
            hosts = (
                None
                if rate == LOOPBACK
                else stack.enter_context(
                    Hosts(bench.hosts, rate, ranks_per_host=bench.ranks_per_host, pin=not bench.awake)
                )
            )
            link = {"link": str(hosts or "shared memory (MPI), loopback TCP")}
            print(f"{link['link']}: starting ranks", flush=True)
            groups: dict[str, Group] = {}
            ranks = bench.hosts * bench.ranks_per_host
            for turn in (turn for turn in missing if turn.rate == rate):
                where = turn.contender.where
                if where not in groups:
                    groups[where] = Group(where, ranks, hosts, folder / "log.txt", not bench.awake, bench.device)
                    stack.callback(groups[where].stop)
                line = turn.key | link | _take(turn, bench, groups[where])
                results.append_line(folder / TURNS, line)
                times = ", ".join(f"{one['seconds']:.3g} s" for one in line.get("exchanges", ()))
                print(f"{turn}: {times or 'failed: ' + line['failed']}", flush=True)


def _take(turn: Turn, bench: Bench, group: Group) -> dict[str, Any]:
    """Return the figures of one turn. A failure is a result, too; the group starts again after it."""
    line = {"kind": turn.contender.kind}
    if not group.up:
        group.start()
    try:
        with group.awake():
            return line | _exchanges(turn, bench, group)
    except RankError as error:
        group.stop()
        return line | {"failed": str(error)}


def _exchanges(turn: Turn, bench: Bench, group: Group) -> dict[str, Any]:
    given = {**turn.set.model_dump(), "tensors": turn.set.tensors()}
    group.ask("prepare", set=given, contender=turn.contender.spec)
    before = group.hosts.sent() if group.hosts else []
    found: list[list[dict[str, Any]]] = []
    began = time.monotonic()
    while not found or (len(found) < bench.repeats and time.monotonic() < began + bench.seconds):
        found.append(group.ask("measure"))
    after = group.hosts.sent() if group.hosts else []
    if turn.contender.label != NOOP and len({reply["checksum"] for reply in group.ask("check")}) > 1:
        raise RankError("ranks ended with different gradients")
    # After a pause the first one may still be disturbed, sometimes by a second
    line: dict[str, Any] = {"exchanges": [_together(replies, bench.hosts) for replies in found[1:] or found]}
    line["dense"] = 4 * nets.total(given["tensors"])
    for what in ("sent", "on_wire", "calls"):
        if what in found[-1][0]:
            line[what] = sum(reply[what] for replies in found for reply in replies) / (len(found) * group.ranks)
    if group.hosts:
        line["interface"] = (sum(after) - sum(before)) / (len(found) * bench.hosts)
    return line


def _together(replies: Sequence[dict[str, Any]], hosts: int) -> dict[str, float]:
    """Combine the ranks' figures of one exchange: from the first start to the last end; parts are means over ranks."""
    one = {"seconds": max(r["end"] for r in replies) - min(r["start"] for r in replies)}
    for what in ("encode", "decode", "blocked"):
        if what in replies[0]:
            one[what] = sum(r[what] for r in replies) / len(replies)
    for what in ("codec", "cpu", "state"):
        if what in replies[0]:
            one[what] = sum(r[what] for r in replies) / hosts
    return one
