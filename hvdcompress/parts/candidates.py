"""Candidates: elements that may be selected, collected in the pass that adds gradient and residual.

Methods that select by magnitude remember the threshold of the last step. The pass that adds gradient and residual
(``ops.accumulate``) records all elements above a somewhat lower threshold. If they suffice, the other elements are not
read again. The selection is the same as without candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from hvdcompress.method import Array, Context, Sparse, Workspace
from hvdcompress.ops.scan import NOTHING, Scan
from hvdcompress.ops.spec import Ops
from hvdcompress.ops.vectors import Scalar

#: Name in ``work.scratch`` of a float32 array [4, parts]. The rows are the last threshold of each part, the threshold
#: before, the factor between the expected next threshold and the candidates' threshold, and the excess: the relative
#: number of candidates to aim for beyond the wanted number
THRESHOLDS = "thresholds"
FACTOR, LEAST_FACTOR, MOST_FACTOR = 0.9, 0.5, 0.998  #: initial value and limits of the factor
EXCESS, LEAST_EXCESS, MOST_EXCESS = 1.5, 0.5, 4.0  #: initial value and limits of the excess
EXCESS_DECAY = 0.97  #: factor of the excess after a step with enough candidates; otherwise the excess doubles
DEFAULT_SLOPE = 0.2  #: assumed exponent: magnitude ~ count^(−slope), if it cannot be measured
CAPACITY = 16  #: candidates are dropped if there are this many times the wanted number


def scan(wanted: int, index: int, work: Workspace) -> Scan:
    """Return the scan that collects candidates, based on the thresholds of earlier steps.

    Args:
        wanted: number of elements that the candidates must contain.
        index: index of the part of the vector.
        work: the workspace; its ``scratch`` contains the thresholds.
    """
    known = work.scratch.get(THRESHOLDS)
    if known is None or index >= known.shape[1] or not known[0, index] > 0:
        return NOTHING
    now, before, factor, _ = known[:, index].tolist()
    return Scan(above=np.float32(factor * _expected(now, before)), capacity=_capacity(wanted))


def _expected(now: float, before: float) -> float:
    """Extrapolate the next threshold from the last two. Residuals grow, and the threshold grows with them."""
    return now + max(now - before, -now) / 2 if before else now


def _capacity(wanted: int) -> int:
    return CAPACITY * wanted + 64


def scan_whole(wanted: int, ctx: Context, work: Workspace) -> Scan:
    """Return the scan for a selection from the whole vector. Buckets of several parts have no candidates then."""
    return scan(wanted, 0, work) if len(ctx.spec.parts) == 1 else NOTHING


def recorded(index: int, work: Workspace) -> Sparse | None:
    """Return the candidates in a part of the vector; None if there was no scan, or if there were too many."""
    return work.scanned[index].above if work.scanned else None


def thresholds(ctx: Context, work: Workspace) -> Array:
    """Return the array of thresholds, float32 [4, parts]. :func:`remember` updates one column."""
    known = work.scratch.get(THRESHOLDS)
    if known is None or known.shape[1] < len(ctx.spec.parts):
        known = np.zeros((4, len(ctx.spec.parts)), np.float32)
        known[2] = FACTOR
        known[3] = EXCESS
        work.scratch[THRESHOLDS] = known
    return known


def remember(known: Array, threshold: float, reached: int, found: int | None, wanted: int) -> None:
    """Update the thresholds of a part after a selection.

    Args:
        known: the column of the part in :func:`thresholds`.
        threshold: the magnitude that all selected elements reach or exceed.
        reached: number of elements that reach it.
        found: number of candidates; None if there was no scan, or if there were too many.
        wanted: number of candidates that were needed.
    """
    now, before, factor, excess = known.tolist()
    if now > 0 and threshold > 0 and reached:  # there was a scan
        expected = _expected(now, before)
        count = _capacity(wanted) if found is None else max(found, 1)
        excess = min(2 * excess, MOST_EXCESS) if count < wanted else max(EXCESS_DECAY * excess, LEAST_EXCESS)
        # Near the threshold, count ~ magnitude^(−1/slope): at which magnitude would the number have been as aimed for?
        slope = math.log(threshold / (factor * expected)) / math.log(count / reached) if count != reached else 0.0
        aim = (1 + excess) * wanted / reached
        factor = threshold * aim ** -(slope if slope > 0 else DEFAULT_SLOPE) / expected
        known[2:] = min(max(factor, LEAST_FACTOR), MOST_FACTOR), excess
    known[:2] = threshold, now


class Elements:
    """The elements of a vector, with counts and selections by threshold.

    Args:
        x: float32 [n].
        near: the elements with |x| > low, if known.
        low: the threshold of ``near``, if known.
        ops: the array backend.
    """

    def __init__(self, x: Array, near: Sparse | None, low: Scalar | None, ops: Ops):
        self.x = x
        self.near = near
        self.low = low or 0.0
        self.ops = ops

    def largest(self) -> float:
        """Return the largest |x|, or 0 for no elements."""
        return self.ops.max_abs(self.x if self.near is None or not len(self.near.index) else self.near.values)

    def mean(self) -> float:
        """Return the mean |x|, or 0 for no elements."""
        return float(self.ops.bucket_norms(self.x, len(self.x), "mean")[0]) if len(self.x) else 0.0

    def count_above(self, threshold: np.float32, enough: int) -> int:
        """Return the number of elements with |x| > threshold.

        The result is exact if it is at most ``enough``. Otherwise it may be any number above ``enough``.
        """
        if self.near is None or (threshold < self.low and len(self.near.index) <= enough):
            return self.ops.count_above(self.x, threshold)
        return len(self.near.index) if threshold < self.low else self.ops.count_above(self.near.values, threshold)

    def narrow(self, threshold: np.float32, count: int) -> None:
        """Restrict later questions to the ``count`` elements above a threshold, if they are few."""
        known = len(self.x) if self.near is None else len(self.near.index)
        if 4 * count < known and (self.near is None or threshold > self.low):
            self.near = self.above(threshold, count)
            self.low = threshold

    def above(self, threshold: np.float32, capacity: int) -> Sparse:
        """Return the first ``capacity`` elements with |x| > threshold."""
        return self._first(self.ops.first_above, threshold, capacity, bool(threshold >= self.low))

    def equal(self, magnitude: np.float32, capacity: int) -> Sparse:
        """Return the first ``capacity`` elements with |x| = magnitude."""
        return self._first(self.ops.first_equal, magnitude, capacity, bool(magnitude > self.low))

    def _first(
        self, find: Callable[..., Array], magnitude: np.float32, capacity: int, are_near: bool | np.bool_
    ) -> Sparse:
        """Return the elements that ``find`` finds; ``are_near``: all of them are among ``near``, if that is known."""
        if self.near is None or not are_near:
            index = find(self.x, magnitude, capacity)
            return Sparse(index, self.ops.take(self.x, index))
        index = find(self.near.values, magnitude, capacity)
        return Sparse(self.ops.take(self.near.index, index), self.ops.take(self.near.values, index))
