"""How long trainings take until their loss is below a given one: what a faster exchange is worth in the end.

A batch's loss is noisy, so the mean of the last few that were logged counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdcompress.lab.output import numbers
from hvdcompress.lab.training import report

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


def _first(row: report.Row, axis: str, target: float) -> float | None:
    """Where the row's first seed reached the loss."""
    curve = row.results[0].curve
    return reached(curve[axis], curve["loss"], target) if curve.get("loss") else None


def table(folder: Path, targets: Mapping[str, float]) -> list[str]:
    """A Markdown table's lines for one folder that ``hvdcompress run`` wrote: seconds and steps to each task's loss.

    Raises:
        ValueError: the folder holds no run, or has no task of such a name.
    """
    found = report.read([folder])
    if missing := sorted(targets.keys() - found.tasks().keys()):
        raise ValueError(f"{folder} has no task {missing[0]!r}; it has: {', '.join(found.tasks())}")
    lines = ["| task, loss | method | time to it | of none's | steps to it |", "|---|---|---:|---:|---:|"]
    for task, target in targets.items():
        rows = [row for row in found.tasks()[task] if row.results]
        times = {row.method: _first(row, "seconds", target) for row in rows}
        dense = times.get("none")
        for row in rows:
            seconds, steps = times[row.method], _first(row, "step", target)
            part = f"{100 * seconds / dense:.0f} %" if seconds and dense else "–"
            words = (
                (numbers.seconds_of(seconds), part, f"{steps:.0f}") if seconds and steps else ("not reached", "–", "–")
            )
            lines.append(f"| {task}, {target:g} | {row.method} | {' | '.join(words)} |")
    return lines
