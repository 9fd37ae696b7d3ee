"""Seconds to the target: steps of the trainings times milliseconds of the timings, and how contenders compare.

Contenders of a seed start from the same weights and draw the same batches. Intervals are those of a t-test at 90 % over
the seeds; a ratio's is that of the seeds' paired ratios.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from experiments.cluster.rates import Rate
from experiments.output.paired import gap_of
from experiments.output.table import MISSING, Column, Table
from experiments.to_accuracy.contenders import DENSE, FP16, NOOP, baseline_of, parse, without_rate
from experiments.to_accuracy.races import RACES, Race
from experiments.to_accuracy.run import Record, best, median_of, reached, records

SCORED = 5  #: the score is the mean of so many last evaluations


@dataclass
class Entry:
    """A contender in a race over a link.

    Attributes:
        name: the contender, without a factor of the learning rate.
        turns: milliseconds of the steps of each turn; empty if it was not timed.
        runs: its trainings by seed, at its best learning rate.
    """

    name: str
    turns: list[list[float]]
    runs: dict[int, Record] = field(default_factory=dict)

    @cached_property
    def milliseconds(self) -> float:
        """The median time of a step."""
        return median_of(self.turns)

    @cached_property
    def seconds(self) -> dict[int, float]:
        """Seconds to the target by seed, of the seeds that reach it."""
        found = {seed: reached(run) for seed, run in self.runs.items()}
        return {seed: there["step"] * self.milliseconds / 1000 for seed, there in found.items() if there}

    @property
    def arrives(self) -> bool:
        """Whether every seed reaches the target."""
        return bool(self.runs) and len(self.seconds) == len(self.runs)

    @property
    def mean(self) -> float:
        """Mean seconds to the target; infinity if a seed does not reach it."""
        return statistics.fmean(self.seconds.values()) if self.arrives else float("inf")

    def ratio_to(self, other: Entry) -> list[float]:
        """Return seconds to the target over those of another contender, for each seed that both have."""
        return [self.seconds[seed] / other.seconds[seed] for seed in self.seconds if seed in other.seconds]


@dataclass
class Comparison:
    """All contenders of a race over a link.

    Attributes:
        race: a key of ``RACES``.
        driver: who exchanged gradients.
        rate: of the links.
        device: where the nets computed, "cpu" or "cuda".
        entries: by name.
    """

    race: str
    driver: str
    rate: str
    device: str
    entries: dict[str, Entry]

    @property
    def alternative(self) -> Entry | None:
        """The contender that reaches the target first without this library; None if none does."""
        others = [each for name, each in self.entries.items() if baseline_of(name) not in (None, NOOP)]
        there = [each for each in others if each.arrives and "@" not in each.name]
        return min(there, key=lambda each: each.mean, default=None)

    def same_training(self, other: Comparison) -> bool:
        """Return whether ``other`` is the same training over another link."""
        return (self.race, self.driver, self.device) == (other.race, other.driver, other.device)

    @property
    def title(self) -> str:
        """Race, target, driver and link."""
        race = RACES[self.race]
        on = ", on a GPU" if self.device == "cuda" else ""
        return f"{self.race}: {_target(race)}, {self.driver}, {race.task.ranks} hosts at {self.rate}{on}"


def _target(race: Race) -> str:
    return f"{race.target:g} {'%' if race.task.metric.higher_is_better else 'bits'}"


def comparisons(folder: Path) -> list[Comparison]:
    """Return what the results of a folder, or of a file, can be combined to; the slowest links first."""
    trainings: dict[tuple[str, str, str], list[Record]] = {}
    for record in records(folder, "train"):
        key = (record["race"], record["driver"], without_rate(record["contender"]))
        trainings.setdefault(key, []).append(record)
    found: dict[tuple[str, str, str, str], Comparison] = {}
    for record in records(folder, "time"):
        race, driver, rate, device = record["race"], record["driver"], record["rate"], record.get("device", "cpu")
        comparison = found.setdefault((race, driver, rate, device), Comparison(race, driver, rate, device, {}))
        for name, turns in record["measured"].items():
            # All drivers exchange the same, so trainings under DDP serve for Horovod's times, too
            runs = trainings.get((race, driver, name)) or trainings.get((race, "ddp", name), [])
            comparison.entries[name] = entry_of(name, turns, runs)
    order = list(RACES)
    return sorted(
        found.values(),
        key=lambda each: (order.index(each.race), each.device, each.driver, Rate.parse(each.rate).slower),
    )


def entry_of(name: str, turns: list[list[float]], runs: Sequence[Record]) -> Entry:
    """Return an entry with the trainings of the learning rate that was best on most seeds."""
    by_rate: dict[str, dict[int, Record]] = {}
    for run in sorted(runs, key=lambda run: run["rate"] is not None, reverse=True):  # those without a link count
        by_rate.setdefault(run["contender"], {})[run["seed"]] = run
    if not by_rate:
        return Entry(name, turns)
    seed = min(min(each) for each in by_rate.values())
    first = best([each[seed] for each in by_rate.values() if seed in each])
    return Entry(name, turns, by_rate[first["contender"]])


def table_of(comparison: Comparison) -> Table[Entry]:
    """Return the contenders of a race over a link, the first to arrive at the top."""
    race, entries = RACES[comparison.race], comparison.entries
    digits = 1 if race.task.metric.higher_is_better else 3

    def against(other: Entry | None) -> Callable[[Entry], str]:
        def cell(entry: Entry) -> str:
            ratios = entry.ratio_to(other) if other and entry.arrives else []
            if not ratios or entry.name == NOOP:
                return MISSING
            mean, low, high = gap_of(ratios)
            return f"{mean:.2f}" + (f" ({low:.2f} to {high:.2f})" if len(ratios) > 1 else "")

        return cell

    def steps(entry: Entry) -> str:
        ends = [reached(run) for _, run in sorted(entry.runs.items())]
        return ", ".join(str(end["step"]) if end else MISSING for end in ends) or MISSING

    def seconds(entry: Entry) -> str:
        if not entry.arrives:
            return "not reached" if entry.runs else MISSING
        return f"{entry.mean:.1f}"

    def score(entry: Entry) -> str:
        ends = [statistics.fmean(each["score"] for each in run["evaluations"][-SCORED:]) for run in entry.runs.values()]
        return f"{statistics.fmean(ends):.{digits}f}" if ends else MISSING

    def rate(entry: Entry) -> str:
        run = next(iter(entry.runs.values()), None)
        return MISSING if run is None else f"{parse(run['contender'], race.task).lr:g}"

    columns: list[Column[Entry]] = [
        Column("contender", "contender", lambda entry: entry.name, align="left"),
        Column("milliseconds", "ms per step", lambda entry: f"{entry.milliseconds:.0f}"),
        Column("lr", "rate", rate),
        Column("steps", "steps", steps),
        Column("seconds", "seconds", seconds),
        Column("alternative", "of the best alternative", against(comparison.alternative)),
        Column("dense", "of dense", against(entries.get(DENSE))),
        Column("fp16", "of fp16", against(entries.get(FP16))),
        Column("score", "score at the end", score),
    ]
    rows = sorted(entries.values(), key=lambda entry: (entry.name != NOOP, entry.mean))
    return Table(columns, rows, title=comparison.title)


def markdown(found: Sequence[Comparison]) -> str:
    """Return all tables as Markdown."""
    tables = [table_of(each) for each in found]
    return "\n".join(f"### {table.title}\n\n{table.markdown()}" for table in tables)
