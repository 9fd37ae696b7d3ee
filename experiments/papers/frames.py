"""What the judges of claims do with data frames of measurements: groups, medians over seeds, gaps to dense training."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pandas as pd

from experiments.report.numbers import number
from experiments.report.tables import MISSING


def over_seeds(frame: pd.DataFrame, by: Sequence[str], values: Sequence[str]) -> pd.DataFrame:
    """Return the median over steps, then the median, least and largest over seeds; NaN if a seed's is (it diverged).

    Args:
        frame: has a column ``seed``.
        by: the columns that make a row.
        values: the columns to summarise. Each gives three: ``x``, ``x least``, ``x largest``.
    """
    seeds = frame.groupby([*by, "seed"], sort=False, dropna=False)[list(values)].median(skipna=False)
    rows = seeds.groupby(list(by), sort=False, dropna=False)
    ends = {"": rows.median(skipna=False), " least": rows.min(skipna=False), " largest": rows.max(skipna=False)}
    found = pd.concat([each.add_suffix(end) for end, each in ends.items()], axis=1)
    return found[[f"{value}{end}" for value in values for end in ends]].reset_index()


def per_seed(frame: pd.DataFrame, value: str) -> list[float]:
    """Return the median over steps for each seed; NaN if one step's is."""
    return list(frame.groupby("seed", sort=False)[value].median(skipna=False))


def spread(values: Sequence[float], show: Callable[[float], str] = number) -> str:
    """Return the median of the seeds' values with the least and the largest: ``0.12 (0.11 to 0.13)``."""
    values = list(values)
    if not values:
        return MISSING
    if lost := sum(map(math.isnan, values)):
        return f"diverged in {lost} of {len(values)}"
    return f"{show(statistics.median(values))} ({show(min(values))} to {show(max(values))})"


def groups(frame: pd.DataFrame, *by: str) -> Iterator[tuple[tuple[Any, ...], pd.DataFrame]]:
    """Iterate over the groups of a frame in the order of their first rows, with the key as a tuple."""
    yield from frame.groupby(list(by), sort=False, dropna=False)


def against_dense(rows: pd.DataFrame, by: str) -> pd.DataFrame:
    """Return trainings with two more columns: ``dense``, the dense training's value, and the ``gap`` to it.

    The gap is NaN if the training diverged, and if the dense one did.

    Args:
        rows: trainings, of which those with the ``method`` "none" are dense.
        by: the column that, with the seed, tells which dense training belongs to a training.
    """
    dense = rows[rows["method"] == "none"].groupby([by, "seed"])["value"].max().rename("dense")
    rows = rows.join(dense, on=[by, "seed"])
    return rows.assign(gap=rows["value"] - rows["dense"])


def exploded(frame: pd.DataFrame, column: str, key: str, value: str) -> pd.DataFrame:
    """Return one row per item of the dicts in a column, with the item's key and value in two new columns."""
    items = {key: frame[column].map(list), value: frame[column].map(lambda each: list(each.values()))}
    return frame.drop(columns=column).assign(**items).explode([key, value], ignore_index=True)
