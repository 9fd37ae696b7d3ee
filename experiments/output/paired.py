"""Paired differences: the same seeds trained in two ways."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import scipy.stats

__all__ = ["CONFIDENCE", "Gap", "gap_of"]

CONFIDENCE = 0.9


class Gap(NamedTuple):
    """The mean of paired differences, and its 90 % interval: NaN with fewer than two pairs."""

    mean: float
    low: float
    high: float


def gap_of(differences: Sequence[float]) -> Gap:
    """Return the mean of paired differences and its t interval."""
    if not differences:
        return Gap(math.nan, math.nan, math.nan)
    mean, count = statistics.fmean(differences), len(differences)
    if count == 1:
        return Gap(mean, math.nan, math.nan)
    error = statistics.stdev(differences) / math.sqrt(count)
    margin = float(scipy.stats.t.ppf((1 + CONFIDENCE) / 2, count - 1)) * error
    return Gap(mean, mean - margin, mean + margin)
