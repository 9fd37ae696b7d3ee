"""From the turns of a benchmark to figures: medians, where the time goes, and how much faster than dense it is."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from experiments.bench.config import LOOPBACK, Bench, Contender, read_turns
from experiments.cluster.rates import HEADERS, Rate
from experiments.report import numbers
from hvdcompress.plan import load

__all__ = ["PARTS", "Figures", "Result", "Row", "best_dense", "ratio", "read"]

LONGEST = 100_000  # steps in a method's cycle that are looked through
PARTS = ("encode", "wire", "wait", "decode", "other")


class Figures(NamedTuple):
    """A median and its spread."""

    middle: float
    least: float
    most: float


@dataclass
class Row:
    """One contender at one set and rate. Seconds and bytes are of one exchange (bytes: of one rank)."""

    rate: str
    set: str
    contender: str
    is_dense: bool
    kind: str = "method"
    alone: int = 0
    shown: str = ""  # the contender's name in tables
    seconds: dict[int, list[float]] = field(default_factory=dict)  # by round
    parts: dict[str, float] = field(default_factory=dict)
    interface: float | None = None
    ledger: dict[str, float] = field(default_factory=dict)
    speed_up: Figures | None = None
    error: str = ""

    @property
    def is_baseline(self) -> bool:
        """Whether it is Horovod's or DDP's own, and none of our methods."""
        return self.kind != "method"

    @property
    def time(self) -> Figures | None:
        """Median, least and most of all exchanges."""
        every = [one for round in self.seconds.values() for one in round]
        return Figures(statistics.median(every), min(every), max(every)) if every else None


@dataclass
class Result:
    """The content of tables and pages: rows, notes, and how the benchmark was launched."""

    name: str
    bench: Bench
    rows: list[Row]
    notes: list[str]
    launch: dict[str, Any]

    def groups(self) -> dict[tuple[str, str], list[Row]]:
        """Rows by set and rate."""
        found: dict[tuple[str, str], list[Row]] = {}
        for row in self.rows:
            found.setdefault((row.set, row.rate), []).append(row)
        return found


def ratio(other: Row, mine: Row) -> Figures | None:
    """How many times faster ``mine`` is than ``other``, by their medians.

    Returns:
        The ratio, with its spread over the rounds, in each of which both were measured within a short time; None if
        one of them was not measured.
    """
    if not (other.time and mine.time):
        return None
    medians = [
        statistics.median(other.seconds[round]) / statistics.median(mine.seconds[round])
        for round in other.seconds.keys() & mine.seconds.keys()
    ]
    middle = other.time.middle / mine.time.middle
    return Figures(middle, min([middle, *medians]), max([middle, *medians]))


def best_dense(rows: Sequence[Row]) -> Row | None:
    """The fastest dense all-reduce among the rows of one set and rate."""
    dense = [row for row in rows if row.is_dense and row.time]
    return min(dense, key=lambda row: row.time.middle, default=None)  # type: ignore[union-attr]


def _row(rate: str, set: str, contender: Contender, turns: Sequence[dict[str, Any]]) -> Row:
    kind, alone = contender.spec["kind"], contender.spec.get("alone", 0)
    row = Row(rate, set, contender.label, contender.is_dense, kind, alone, contender.shown)
    well = [turn for turn in turns if "failed" not in turn]
    row.error = next((turn["failed"] for turn in turns if "failed" in turn), "")
    if not well:
        return row
    row.seconds = {turn["round"]: [one["seconds"] for one in turn["exchanges"]] for turn in well}
    mean = statistics.fmean
    row.ledger = {k: mean(t[k] for t in well) for k in ("dense", "sent", "on_wire", "calls") if k in well[0]}
    if "interface" in well[0]:
        row.interface = mean(mean(turn["interface"]) for turn in well)
    every = [one for turn in well for one in turn["exchanges"]]
    if "blocked" in every[0]:
        row.parts = _parts(row, every)
    return row


def _parts(row: Row, exchanges: Sequence[dict[str, float]]) -> dict[str, float]:
    """Where the median exchange's seconds went, by the average shares of all exchanges.

    While a rank is blocked in Horovod, the link needs a part of the time for the bytes; the rest is waiting. (Not by
    the interface's count, which has in it what Horovod says while nothing is exchanged.)
    """
    total = sum(one["seconds"] for one in exchanges)
    share = {what: sum(one[what] for one in exchanges) / total for what in ("encode", "decode", "blocked")}
    assert row.time
    found = {what: part * row.time.middle for what, part in share.items()}
    blocked = found.pop("blocked")
    found["other"] = max(0.0, row.time.middle - blocked - found["encode"] - found["decode"])
    if row.rate == LOOPBACK:
        found["wait"] = blocked
    else:
        found["wire"] = min(blocked, 8 * (1 + HEADERS) * row.ledger["on_wire"] / Rate.parse(row.rate).slower)
        found["wait"] = blocked - found["wire"]
    return found


def read(folder: Path) -> Result:
    """Read the results in a folder that ``python -m experiments bench`` wrote.

    Raises:
        ValueError: it holds no benchmark.
    """
    if not (folder / "config.yaml").is_file():
        raise ValueError(f"{folder} holds no benchmark: it has no config.yaml")
    bench = Bench.open(folder / "config.yaml")
    turns = read_turns(folder)
    rates = list(dict.fromkeys(turn["rate"] for turn in turns))
    rows = []
    for one in bench.sets:
        for rate in rates:
            here = [turn for turn in turns if (turn["rate"], turn["set"]) == (rate, one.label)]
            group = [
                _row(rate, one.label, each, found)
                for each in bench.contenders()
                if (found := [turn for turn in here if turn["contender"] == each.label])
            ]
            best = best_dense(group)
            for row in group:
                row.speed_up = ratio(best, row) if best else None
            rows += group
    file = folder / "launch.json"
    launch = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return Result(folder.resolve().name, bench, rows, _notes(bench, rows, turns, launch), launch)


def _notes(bench: Bench, rows: Sequence[Row], turns: Sequence[dict[str, Any]], launch: dict[str, Any]) -> list[str]:
    """What a reader must know to read the figures correctly."""
    machine = launch.get("machine", {})
    cores = machine.get("cores", "?")
    notes = []
    for link in launch.get("links", []):
        if "reached" in link:
            notes.append(
                f"{link['link']}: a TCP stream from each host to the next, all at once, got across "
                f"{', '.join(link['reached'])}."
            )
        else:
            notes.append(f"No emulated hosts: {link['link']}; these times say nothing about a network.")
    commits = {each.get("commit") for each in [*launch.get("earlier", []), launch]}
    if len(commits) > 1:
        notes.append(
            f"Measured in several attempts, of {len(commits)} versions of the code: {', '.join(map(str, commits))}."
        )
    notes.append(
        f"{bench.hosts} ranks share {cores} cores{' (' + machine['cpu'] + ')' if machine.get('cpu') else ''}: where "
        "ranks outnumber cores, encode and decode take as much longer as they have to wait for a core. On hosts of "
        "their own they would not."
    )
    if copies := [turn["copy"] for turn in turns if "copy" in turn]:
        middle, least, most = map(numbers.seconds_of, (statistics.median(copies), min(copies), max(copies)))
        notes.append(f"One core copied 100 MB in {middle} ({least} to {most}), between the turns.")
    if "gpu" in machine:
        notes.append(
            f"All ranks share one GPU ({machine['gpu']}), which runs their kernels in turns. A collective ends when "
            "each has had its turn, so many small ones take longer than on GPUs of their own. NCCL sends over sockets, "
            "through the hosts' memory."
        )
    notes += [f"{one}." for one in bench.sets]
    notes += [_warmed_up(bench, row, rows) for row in rows if row.alone and row.time]
    notes += sorted({f"{row.contender} on {row.set}, {row.rate}: {row.error}" for row in rows if row.error})
    return notes


def _warmed_up(bench: Bench, row: Row, rows: Sequence[Row]) -> str:
    """A note on a method of which only the later steps were measured: its mean time with the dense ones."""
    place = "" if row.rate == LOOPBACK else f", {Rate.parse(row.rate)}"
    said = f"{row.contender} on {row.set}{place}: measured after {row.alone} steps that were made without the network"
    settings = next(entry.settings for entry in bench.methods if entry.label == row.contender)
    method = load(settings).program.main
    best = best_dense([other for other in rows if (other.set, other.rate) == (row.set, row.rate)])
    last = len(method.phases) - 1
    later = [age for age in range(row.alone, LONGEST) if method.phase_of(age) != last]
    if not (best and best.time and row.time and last and later):
        return f"{said}."
    cycle = later[0]
    dense = sum(method.phase_of(age) != last for age in range(cycle))
    mean = (dense * best.time.middle + (cycle - dense) * row.time.middle) / cycle
    return (
        f"{said}. Of {cycle} steps {dense} are not compressed: with those as fast as the best dense all-reduce, its "
        f"mean is {numbers.seconds_of(mean)}, {numbers.number(best.time.middle / mean)} times as fast as that."
    )
