"""How long trainings take until their loss is below a given one, which is what a faster exchange is for.

A batch's loss is noisy, so the mean of the last few that were logged counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hvdcompress.lab.output import numbers
from hvdcompress.lab.output.table import MISSING, Column, Table
from hvdcompress.lab.training import results

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


def _first(row: results.Row, axis: str, target: float) -> float | None:
    """The step or second at which the row's first seed reached the loss."""
    curve = row.results[0].curve
    return reached(curve[axis], curve["loss"], target) if curve.get("loss") else None


class Time(NamedTuple):
    """The time of one method to a task's loss; None where it was not reached."""

    task: str
    target: float
    method: str
    seconds: float | None
    steps: float | None
    dense: float | None  #: seconds without compression


def _share(row: Time) -> float | None:
    return row.seconds / row.dense if row.seconds and row.dense else None


COLUMNS: tuple[Column[Time], ...] = (
    Column("task", "task, loss", lambda row: f"{row.task}, {row.target:g}", align="left"),
    Column("method", "method", lambda row: row.method, align="left"),
    Column(
        "seconds",
        "time to it",
        lambda row: numbers.seconds_of(row.seconds) if row.seconds else "not reached",
        lambda row: row.seconds,
        "s",
    ),
    Column(
        "share",
        "of none's",
        lambda row: f"{100 * share:.0f} %" if (share := _share(row)) else MISSING,
        _share,
    ),
    Column("steps", "steps to it", lambda row: f"{row.steps:.0f}" if row.steps else MISSING, lambda row: row.steps),
)


def table(folder: Path, targets: Mapping[str, float]) -> Table[Time]:
    """Seconds and steps to each task's loss, for one folder that ``hvdcompress run`` wrote.

    Args:
        folder: the training's.
        targets: the loss to reach, by the task's label.

    Raises:
        ValueError: the folder holds no training, or has no task of such a name.
    """
    found = results.read([folder])
    if missing := sorted(targets.keys() - found.tasks().keys()):
        raise ValueError(f"{folder} has no task {missing[0]!r}; it has: {', '.join(found.tasks())}")
    times = []
    for task, target in targets.items():
        rows = [row for row in found.tasks()[task] if row.results]
        seconds = {row.method: _first(row, "seconds", target) for row in rows}
        for row in rows:
            steps = _first(row, "step", target)
            times.append(Time(task, target, row.method, seconds[row.method], steps, seconds.get("none")))
    return Table(COLUMNS, times)
