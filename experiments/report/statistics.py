"""Means over seeds with 90 % intervals, and paired differences between contenders."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import scipy.stats

__all__ = ["CONFIDENCE", "Interval", "gaps", "interval"]

CONFIDENCE = 0.9


class Interval(NamedTuple):
    """A mean, and the ends of its 90 % interval: NaN with fewer than two values."""

    mean: float
    low: float
    high: float


def interval(values: Any) -> Interval:
    """Return the mean of values and its t interval (a bootstrap's is too short for three to five seeds)."""
    values = np.asarray(values, float)
    if len(values) < 2:
        return Interval(float(values.mean()) if len(values) else math.nan, math.nan, math.nan)
    if np.ptp(values) <= 1e-12 * np.abs(values).max():  # equal but for rounding
        return Interval(float(values[0]), float(values[0]), float(values[0]))
    ends = scipy.stats.ttest_1samp(values, 0.0).confidence_interval(CONFIDENCE)
    return Interval(float(values.mean()), float(ends.low), float(ends.high))


def gaps(frame: pd.DataFrame, value: str, by: str, reference: str, paired: list[str]) -> pd.DataFrame:
    """Return paired differences to a reference contender, with intervals.

    Args:
        frame: one row per run.
        value: the column that is compared.
        by: the column of contenders.
        reference: the contender that the others are compared with.
        paired: columns that make a pair, such as ``["task", "seed"]``; all but the last, which is averaged over, stay.

    Returns:
        Columns ``paired[:-1]``, ``by``, ``mean``, ``low``, ``high``, ``pairs``.
    """
    base = frame[frame[by] == reference].set_index(paired)[value].rename("_reference")
    joined = frame[frame[by] != reference].join(base, on=paired)
    joined["_gap"] = joined[value] - joined["_reference"]
    rows = []
    for keys, group in joined.dropna(subset=["_gap"]).groupby([*paired[:-1], by], sort=False):
        names = dict(zip([*paired[:-1], by], keys, strict=True))
        rows.append({**names, **interval(group["_gap"])._asdict(), "pairs": len(group)})
    return pd.DataFrame(rows)
