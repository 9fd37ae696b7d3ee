"""Rows of results, and what tables and sentences say of them: groups, medians over steps, spreads over seeds."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from experiments.output.table import MISSING, Column
from experiments.report.numbers import number

Row = dict[str, Any]


def grouped(rows: Iterable[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    """Rows by the values of some keys, in the order of their coming."""
    found: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        found[tuple(row[key] for key in keys)].append(row)
    return dict(found)


def over_seeds(rows: Sequence[Row], value: Callable[[Row], float]) -> list[float]:
    """The median over steps, for each seed."""
    return [statistics.median(map(value, one)) for one in grouped(rows, "seed").values()]


def spread(values: Sequence[float], show: Callable[[float], str] = number) -> str:
    """``0.12 (0.11 to 0.13)``: the median of the seeds' values, the least and the largest."""
    if lost := sum(map(math.isnan, values)):
        return f"diverged in {lost} of {len(values)}"
    return f"{show(statistics.median(values))} ({show(min(values))} to {show(max(values))})"


def text(key: str, title: str, align: Any = "right") -> Column[Row]:
    """A column of what a row has under a key."""
    return Column(key, title, lambda row: str(row.get(key, MISSING)), align=align)
