"""Compare the contenders of a folder with dense training, seed by seed.

The gap is dense minus contender for accuracy and contender minus dense for bits per byte, so a positive gap is a loss.
Its 90 % interval is that of a paired t-test over the seeds.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from experiments.momentum.contenders import DENSE
from experiments.momentum.tasks import TASKS, Task
from experiments.output.paired import Gap, gap_of
from experiments.output.table import MISSING, Column, Table
from experiments.report import numbers

STEPS = 1500  #: of a run, unless another number is asked for
Record = dict[str, Any]


class Limits(NamedTuple):
    """A gap is closed if its mean and the upper bound of its interval are at most these."""

    mean: float
    upper: float


ACCURACY_LIMITS = Limits(0.5, 0.8)  # percentage points
BITS_LIMITS = Limits(0.05, 0.08)  # bits per byte


@dataclass(frozen=True)
class Group:
    """Results that can be compared: of one task, with one number of steps.

    Attributes:
        name: the task's name.
        task: its settings.
        steps: steps per run.
        runs: records by contender and seed.
    """

    name: str
    task: Task
    steps: int
    runs: dict[str, dict[int, Record]]

    @property
    def title(self) -> str:
        """The task, the number of steps and ranks, and the unit of its scores."""
        metric = self.task.metric
        better = "higher" if metric.higher_is_better else "lower"
        measured = f"{metric.name} ({metric.unit}, {better} is better)"
        return f"{self.name}: {self.steps} steps, {self.task.ranks} ranks, {measured}"

    @property
    def limits(self) -> Limits:
        """The limits of a closed gap, in the unit of the scores."""
        return ACCURACY_LIMITS if self.task.metric.higher_is_better else BITS_LIMITS

    def done(self, contender: str) -> dict[int, Record]:
        """Return the runs of a contender that did not diverge, by seed."""
        return {seed: run for seed, run in self.runs.get(contender, {}).items() if run["status"] == "done"}

    def gap(self, contender: str) -> Gap:
        """Return the paired gap to dense training over the seeds that both have."""
        dense, other = self.done(DENSE), self.done(contender)
        sign = 1 if self.task.metric.higher_is_better else -1
        return gap_of([sign * (dense[seed]["score"] - run["score"]) for seed, run in other.items() if seed in dense])

    def closed(self, contender: str) -> bool | None:
        """Return whether the gap is closed; None if too few seeds were run to say so."""
        if len(self.done(contender)) < len(self.runs[contender]):
            return False
        gap = self.gap(contender)
        return None if math.isnan(gap.high) else gap.mean <= self.limits.mean and gap.high <= self.limits.upper


def groups_of(records: Sequence[Record]) -> list[Group]:
    """Sort records into groups whose settings are equal apart from contender and seed."""
    found: dict[tuple[str, str, int], Group] = {}
    for record in records:
        key = (record["name"], json.dumps(record["task"], sort_keys=True), record["steps"])
        group = found.setdefault(key, Group(record["name"], Task(**record["task"]), record["steps"], defaultdict(dict)))
        group.runs[record["contender"]["name"]][record["seed"]] = record
    return [found[key] for key in sorted(found)]


def table_of(group: Group) -> Table[str]:
    """Return the table of a group: a row per contender, dense first, then by gap."""

    def order(name: str) -> tuple[bool, float, str]:
        gap = group.gap(name).mean
        return (math.isnan(gap), 0.0 if math.isnan(gap) else gap, name)

    others = sorted((name for name in group.runs if name != DENSE), key=order)
    rows = [DENSE, *others] if DENSE in group.runs else others
    digits = 2 if group.task.metric.higher_is_better else 3

    def score(name: str) -> str:
        scores = [run["score"] for run in group.done(name).values()]
        if not scores:
            return MISSING
        spread = f" ± {statistics.stdev(scores):.{digits}f}" if len(scores) > 1 else ""
        return f"{statistics.fmean(scores):.{digits}f}{spread}"

    def gap(name: str) -> str:
        mean = group.gap(name).mean
        return MISSING if name == DENSE or math.isnan(mean) else f"{mean:+.{digits}f}"

    def interval(name: str) -> str:
        _, low, high = group.gap(name)
        return MISSING if name == DENSE or math.isnan(high) else f"{low:+.{digits}f} to {high:+.{digits}f}"

    def closed(name: str) -> str:
        return MISSING if name == DENSE else {True: "yes", False: "no", None: MISSING}[group.closed(name)]

    def seeds(name: str) -> str:
        diverged = len(group.runs[name]) - len(group.done(name))
        return f"{len(group.runs[name])}" + (f" ({diverged} diverged)" if diverged else "")

    def median(name: str, key: str) -> float:
        return statistics.median(run[key] for run in group.runs[name].values())

    columns: list[Column[str]] = [
        Column("contender", "contender", lambda name: name, align="left"),
        Column("seeds", "seeds", seeds),
        Column("score", "score", score),
        Column("gap", "gap", gap),
        Column("interval", "90 % interval", interval),
        Column("closed", "closed", closed),
        Column("ratio", "compression ratio", lambda name: numbers.rate_of(median(name, "ratio"))),
        Column("seconds", "seconds per run", lambda name: f"{median(name, 'seconds'):.0f}"),
    ]
    return Table(columns, rows, title=group.title)


def overview(groups: Sequence[Group]) -> Table[str]:
    """Return a table of gaps: a row per contender that several tasks have, a column per task; ✓: the gap is closed."""

    def cell(group: Group, name: str) -> str:
        digits = 2 if group.task.metric.higher_is_better else 3
        if name == DENSE and group.done(DENSE):
            return f"{statistics.fmean(run['score'] for run in group.done(DENSE).values()):.{digits}f}"
        mean, low, high = group.gap(name)
        if math.isnan(mean):
            return "diverged" if group.runs.get(name) and not group.done(name) else MISSING
        text = f"{mean:+.{digits}f}"
        if group.closed(name):
            text += " ✓"
        return text if math.isnan(high) else f"{text} ({low:+.{digits}f} to {high:+.{digits}f})"

    names = dict.fromkeys(name for group in groups for name in group.runs)
    several = [name for name in names if sum(name in group.runs for group in groups) > 1]
    columns: list[Column[str]] = [
        Column("contender", "contender", lambda name: name, align="left"),
        *(Column(group.name, group.name, partial(cell, group)) for group in groups),
    ]
    return Table(columns, sorted(several, key=lambda name: (name != DENSE, name)), title="Gaps to dense training")


def markdown(records: Sequence[Record]) -> str:
    """Return all tables as GitHub Markdown, with an explanation of their columns."""
    groups = groups_of(records)
    parts = [f"### {group.title}\n\n{table_of(group).markdown()}" for group in groups]
    usual = [group for group in groups if group.task == TASKS.get(group.name) and group.steps == STEPS]
    if len(usual) > 1:
        table = overview(usual)
        parts.insert(0, f"### {table.title} after {STEPS} steps\n\n{table.markdown()}")
    return "\n".join([*parts, NOTES])


NOTES = f"""\
Score: mean of the last five evaluations, then mean ± standard deviation over the seeds. Gap: the loss compared with
dense training on the same seeds (positive is worse), with the 90 % interval of a paired t-test. Closed: mean gap ≤
{ACCURACY_LIMITS.mean} points and upper bound ≤ {ACCURACY_LIMITS.upper} points; for text {BITS_LIMITS.mean} and \
{BITS_LIMITS.upper} bits. A contender that diverged on any seed is not closed.
"""
