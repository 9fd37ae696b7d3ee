"""What papers' reports have in common: rows by key, medians over steps and their spread over seeds, columns."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hvdcompress.lab.output.numbers import number
from hvdcompress.lab.output.table import MISSING, Column
from hvdcompress.lab.reproduce.claims import Kind, Verdict, judge

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


def judge_by(cells: Mapping[tuple[str, str], Sequence[bool]], otherwise: str) -> Verdict:
    """A verdict as ``claims.judge`` makes it, whose conditions are told by their first word, each with its second ones.

    Args:
        cells: whether the rule was met, one value a seed, by two words of a condition: "than dense", "at 1 Gbit/s".
        otherwise: why the claim does not hold, where no condition meets the rule in every seed.

    >>> str(judge_by({("a", "1"): [True], ("a", "2"): [True], ("b", "1"): [True], ("b", "2"): [False]}, "-"))
    'holds under these conditions: a everywhere; b 1 (3 of 4)'
    """
    verdict = judge({f"{first} {second}": seeds for (first, second), seeds in cells.items()}, otherwise)
    if verdict.kind is not Kind.CONDITIONS:
        return verdict
    told = []
    for first in dict.fromkeys(first for first, _ in cells):
        places = {second: all(seeds) for (each, second), seeds in cells.items() if each == first}
        met = [second for second, every in places.items() if every]
        if met:
            told.append(f"{first} {'everywhere' if len(met) == len(places) else ', '.join(met)}")
    count = sum(map(all, cells.values()))
    return Verdict(Kind.CONDITIONS, f"{'; '.join(told)} ({count} of {len(cells)})")
