"""How long trainings take until their loss is below a given one, which is what a faster exchange is for.

A batch's loss is noisy, so the mean of the last few that were logged counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib

from experiments.output import plots
from experiments.output.table import MISSING, Column, Table
from experiments.report import numbers
from experiments.training import results

WINDOW = 5  #: logged losses in the mean


def reached(steps: Sequence[float], losses: Sequence[float], target: float) -> float | None:
    """The first of ``steps`` (or seconds) at which the mean of the last :data:`WINDOW` losses is ``target`` or less.

    >>> reached([1, 2, 3, 4, 5, 6, 7], [9, 5, 4, 3, 2, 1, 1], 3.0)
    6
    >>> reached([1, 2, 3], [0, 0, 0], 3.0)      # too few to tell
    """
    for end in range(WINDOW, len(losses) + 1):
        if statistics.fmean(losses[end - WINDOW : end]) <= target:
            return steps[end - 1]
    return None


class Time(NamedTuple):
    """What one method takes to a task's loss: by seed, of those that reach it."""

    task: str
    target: float
    method: str
    seeds: int
    seconds: Mapping[int, float]
    steps: Mapping[int, float]
    dense: Mapping[int, float]  #: seconds without compression

    @property
    def shares(self) -> list[float]:
        """The seconds by those of dense training, for every seed in which both reach the loss."""
        return [seconds / self.dense[seed] for seed, seconds in self.seconds.items() if seed in self.dense]


def _firsts(row: results.Row, axis: str, target: float) -> dict[int, float]:
    """The step or second at which each seed of the row reached the loss."""
    found = {
        result.seed: reached(result.curve[axis], result.curve["loss"], target)
        for result in row.results
        if result.curve.get("loss")
    }
    return {seed: at for seed, at in found.items() if at is not None}


def _told(values: Iterable[float], show: Callable[[float], str]) -> str:
    """The median, and the least and the greatest where there are several."""
    values = list(values)
    if not values:
        return MISSING
    middle = show(statistics.median(values))
    return f"{middle} ({show(min(values))} – {show(max(values))})" if len(values) > 1 else middle


def _seconds(row: Time) -> str:
    if not row.seconds:
        return "not reached"
    lost = row.seeds - len(row.seconds)
    return _told(row.seconds.values(), numbers.seconds_of) + (f", not reached in {lost} of {row.seeds}" if lost else "")


def _median(values: Iterable[float]) -> float | None:
    values = list(values)
    return statistics.median(values) if values else None


COLUMNS: tuple[Column[Time], ...] = (
    Column("task", "task, loss", lambda row: f"{row.task}, {row.target:g}", align="left"),
    Column("method", "method", lambda row: row.method, align="left"),
    Column("seconds", "time to it", _seconds, lambda row: _median(row.seconds.values()), "s"),
    Column(
        "share",
        "of none's",
        lambda row: _told(row.shares, lambda share: f"{100 * share:.0f} %"),
        lambda row: _median(row.shares),
    ),
    Column(
        "steps",
        "steps to it",
        lambda row: _told(row.steps.values(), lambda steps: f"{steps:.0f}"),
        lambda row: _median(row.steps.values()),
    ),
)


def times(folder: Path, targets: Sequence[tuple[str, float]]) -> list[Time]:
    """Seconds and steps to some losses, for one folder that ``python -m experiments run`` wrote.

    Args:
        folder: the training's.
        targets: a task's label and a loss to reach, several of a task if one likes.

    Raises:
        ValueError: the folder holds no training, or has no task of such a name.
    """
    found = results.read([folder])
    if missing := sorted({task for task, _ in targets} - found.tasks().keys()):
        raise ValueError(f"{folder} has no task {missing[0]!r}; it has: {', '.join(found.tasks())}")
    rows = []
    for task, target in targets:
        methods = [row for row in found.tasks()[task] if row.results]
        seconds = {row.method: _firsts(row, "seconds", target) for row in methods}
        for row in methods:
            steps, dense = _firsts(row, "step", target), seconds.get("none", {})
            rows.append(Time(task, target, row.method, len(row.results), seconds[row.method], steps, dense))
    return rows


def table(rows: Sequence[Time]) -> Table[Time]:
    """:func:`times` for readers: medians over the seeds, with the least and the greatest."""
    return Table(COLUMNS, rows)


def picture(rows: Sequence[Time], name: str) -> str:
    """Bars, a line per task and method: the time to the loss, in % of dense training's.

    Args:
        rows: what :func:`times` found.
        name: of the figure, which tells its parts' ids apart on a page.
    """
    rows = [row for row in rows if row.shares and row.method != "none"]
    tasks = list(dict.fromkeys(row.task for row in rows))
    with matplotlib.rc_context(plots.STYLE):
        figure = plots.figure(1.1 + 0.3 * len(rows))
        axes = figure.add_subplot()
        for place, row in enumerate(rows):
            middle, least, most = (100 * each(row.shares) for each in (statistics.median, min, max))
            axes.barh(place, middle, color=plots.colour(tasks.index(row.task)), height=0.66)
            plots.spread(axes, place, middle, least, most, f"{middle:.0f} %")
        plots.name_lines(axes, [f"{row.task} {row.target:g}: {row.method}" for row in rows])
        axes.set_xlim(0, 1.15 * max([100.0, *(100 * max(row.shares) for row in rows)]))
        axes.axvline(100, color=plots.INK, linewidth=0.8)
        seeds = max((row.seeds for row in rows), default=0)
        axes.set_xlabel(f"% of dense training's time ({seeds} seeds: median, least to greatest)")
        axes.set_title("Time to a fixed loss: left of the line is faster than dense", loc="left", fontsize=10)
        return plots.svg(figure, name, "Time to a fixed loss by dense training's, a bar per task and method")
