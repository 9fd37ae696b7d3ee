"""Compare the losses of dense and compressed trainings after the same seconds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import scipy.stats

from hvdcompress.cli.numbers import number

CONFIDENCE = 0.9
FIFTHS = 5  #: a training's loss is the mean over the last fifth of its steps
SURE = 3.0  #: standard errors by which the loss of dense training has to fall
SPREAD = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)  #: half of the 90 % interval, in standard errors


class Gap(NamedTuple):
    """The mean of paired differences and its 90 % interval, which is NaN with fewer than two pairs."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        interval = f"{100 * CONFIDENCE:.0f} % interval {number(self.low)} to {number(self.high)}"
        return number(self.mean) + ("" if math.isnan(self.low) else f" ({interval})")


def gap_of(differences: Sequence[float]) -> Gap:
    """Return the mean of paired differences with its t interval."""
    mean, count = (statistics.fmean(differences) if differences else math.nan), len(differences)
    if count < 2:
        return Gap(mean, math.nan, math.nan)
    margin = float(scipy.stats.t.ppf((1 + CONFIDENCE) / 2, count - 1)) * _error(differences)
    return Gap(mean, mean - margin, mean + margin)


@dataclass(frozen=True)
class Curve:
    """One training: the time since its start at the end of each step in seconds, and the losses, means over ranks."""

    seconds: Sequence[float]
    losses: Sequence[float]

    def fifth(self, index: int) -> Sequence[float]:
        """Return the losses of a fifth of the steps, from index 0; at least one loss."""
        count = len(self.losses)
        start = min(index * count // FIFTHS, count - 1)
        return self.losses[start : max(start + 1, (index + 1) * count // FIFTHS)]

    @property
    def loss(self) -> float:
        """The loss at the end; NaN if any loss was NaN or Inf."""
        return statistics.fmean(self.fifth(FIFTHS - 1)) if np.isfinite(self.losses).all() else math.nan

    def reached(self, loss: float) -> float | None:
        """Return the seconds after which the mean over a fifth of the steps was this loss or less; None if never."""
        window = len(self.fifth(FIFTHS - 1))
        ends = range(window, len(self.losses) + 1)
        return next((self.seconds[e - 1] for e in ends if statistics.fmean(self.losses[e - window : e]) <= loss), None)


@dataclass(frozen=True)
class Trial:
    """Trainings of a contender and dense ones, paired by seeds: with the same weights, batches and seconds."""

    label: str
    seconds: float
    dense: Sequence[Curve]
    curves: Sequence[Curve]

    def _pairs(self) -> list[tuple[Curve, Curve]]:
        return list(zip(self.curves, self.dense, strict=True))

    @property
    def gap(self) -> Gap:
        """The contender's loss minus dense training's, where both are finite; positive is worse."""
        differences = [one.loss - dense.loss for one, dense in self._pairs()]
        return gap_of([each for each in differences if math.isfinite(each)])

    @property
    def diverged(self) -> bool:
        """Whether the contender's loss became NaN or Inf where dense training's did not."""
        return any(math.isnan(one.loss) and not math.isnan(dense.loss) for one, dense in self._pairs())

    @property
    def lost(self) -> bool:
        """Whether it diverged, or its loss is worse beyond the spread: over all seeds, or within each of them."""
        last = FIFTHS - 1
        each = [
            one.loss - dense.loss > SPREAD * math.hypot(_error(one.fifth(last)), _error(dense.fifth(last)))
            for one, dense in self._pairs()
        ]
        return self.diverged or all(each) or self.gap.low > 0

    @property
    def learns(self) -> bool:
        """Whether the dense losses are finite, and still fell after the second fifth by more than they vary."""
        early, late = ([loss for curve in self.dense for loss in curve.fifth(at)] for at in (1, FIFTHS - 1))
        return statistics.fmean(early) - statistics.fmean(late) > SURE * math.hypot(_error(early), _error(late))

    def conclusion(self) -> str:
        """Return what follows from the losses, as a sentence."""
        if self.diverged:
            return f"The loss of {self.label} became NaN or Inf, and that of dense training did not."
        if self.lost:
            return f"After the same {self.seconds:g} s, the loss of {self.label} is worse than dense, by {self.gap}."
        if any(math.isnan(curve.loss) for curve in self.dense):
            return "Dense training diverged, so the losses say nothing: use a smaller learning rate in --optimizer."
        if not self.learns:
            return (
                "The loss of dense training hardly fell, so the losses say nothing: give more --seconds, and batches "
                "that can be learned (random numbers cannot)."
            )
        reached = [one.reached(dense.loss) for one, dense in self._pairs()]
        if None not in reached and self.gap.mean <= 0:
            seconds = statistics.fmean(min(each, self.seconds) for each in reached if each is not None)
            return f"{self.label} reached the loss of dense training after {number(seconds)} of {self.seconds:g} s."
        return f"The losses differ by less than they vary, {self.gap}: more --seeds or --seconds tell more."


def _error(values: Sequence[float]) -> float:
    """Return the standard error of the mean; 0 for a single value."""
    return float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0
