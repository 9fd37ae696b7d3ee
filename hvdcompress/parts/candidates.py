"""Candidates: the few elements of a vector that may be selected, noted while it is made.

Methods that select by magnitude remember the threshold of the last step. Elements that are above a somewhat lower one
are noted in the pass that adds gradient and residual (``ops.accumulate``). Where they turn out to be enough, nothing
needs to look at the others, and the selection is the same as if it had.
"""

from __future__ import annotations

import math

import numpy as np

from hvdcompress.method import Array, Context, Sparse, Workspace
from hvdcompress.ops.scan import NOTHING, Scan
from hvdcompress.ops.spec import Ops
from hvdcompress.ops.vectors import Scalar

THRESHOLDS = "thresholds"  #: in ``work.scratch``, float32 [4, parts]: the last threshold of each part, the one before,
# what the expected next one is multiplied by (factor), and by which part candidates should be more than are wanted
FACTOR, LEAST_FACTOR, MOST_FACTOR = 0.9, 0.5, 0.998
EXCESS, LEAST_EXCESS, MOST_EXCESS = 1.5, 0.5, 4.0
CALMER = 0.97  #: by which the excess shrinks where there were enough candidates; it doubles where there were too few
STEEP = 0.2  #: where nothing is known, 1/STEEP is the power of the magnitude that counts fall with
ROOM = 16  #: candidates are not noted if they are so many times as many as wanted


def scan(wanted: int, index: int, work: Workspace, moments: bool = False) -> Scan:
    """Return what to look for in gradient + residual: elements that may be selected, by the last steps' thresholds.

    Args:
        wanted: how many elements have to be among the candidates.
        index: which part of the vector is meant, from 0.
        work: its ``scratch`` has the thresholds.
        moments: whether the moments are needed, too.
    """
    known = work.scratch.get(THRESHOLDS)
    if known is None or index >= known.shape[1] or not known[0, index] > 0:
        return Scan(moments)
    now, before, factor, _ = known[:, index].tolist()
    return Scan(moments, above=np.float32(factor * _expected(now, before)), capacity=_room(wanted))


def _expected(now: float, before: float) -> float:
    """Return the next threshold after two: as residuals grow, so does it."""
    return now + max(now - before, -now) / 2 if before else now


def _room(wanted: int) -> int:
    return ROOM * wanted + 64


def scan_whole(wanted: int, ctx: Context, work: Workspace, moments: bool = False) -> Scan:
    """Return what to look for if elements are selected from the vector as a whole: nothing where it is a bucket."""
    return scan(wanted, 0, work, moments) if len(ctx.spec.parts) == 1 else NOTHING


def of(index: int, work: Workspace) -> Sparse | None:
    """Return the candidates that were noted in a part of the vector, or None if they were not or were too many."""
    return work.scanned[index].above if work.scanned else None


def thresholds(ctx: Context, work: Workspace) -> Array:
    """Return the array [4, parts] that :func:`remember` writes to, a part's column at a time."""
    known = work.scratch.get(THRESHOLDS)
    if known is None or known.shape[1] < len(ctx.spec.parts):
        known = np.zeros((4, len(ctx.spec.parts)), np.float32)
        known[2], known[3] = FACTOR, EXCESS
        work.scratch[THRESHOLDS] = known
    return known


def remember(known: Array, threshold: float, reached: int, found: int | None, wanted: int) -> None:
    """Remember the threshold of a selection for the next step.

    Args:
        known: the column of the part, of :func:`thresholds`.
        threshold: what all selected elements reach or exceed.
        reached: how many elements do.
        found: the number of candidates that there were, or None if they were not noted or too many.
        wanted: how many there had to be.
    """
    now, before, factor, excess = known.tolist()
    if now > 0 and threshold > 0 and reached:  # candidates were looked for
        expected, count = _expected(now, before), _room(wanted) if found is None else max(found, 1)
        excess = min(2 * excess, MOST_EXCESS) if count < wanted else max(CALMER * excess, LEAST_EXCESS)
        # near the threshold, counts go with a power of the magnitude: where would there have been as many as aimed at?
        steep = math.log(threshold / (factor * expected)) / math.log(count / reached) if count != reached else 0.0
        aim = (1 + excess) * wanted / reached
        factor = threshold * aim ** -(steep if steep > 0 else STEEP) / expected
        known[2:] = min(max(factor, LEAST_FACTOR), MOST_FACTOR), excess
    known[:2] = threshold, now


class Elements:
    """The elements of a vector, which are asked for those above thresholds.

    Args:
        x: float32 [n].
        near: the elements with |x| > low, if they are known.
        low: what these exceed, if they are known.
        ops: the array backend.
    """

    def __init__(self, x: Array, near: Sparse | None, low: Scalar | None, ops: Ops):
        self.x, self.near, self.low, self.ops = x, near, low or 0.0, ops

    def largest(self) -> float:
        """Return the largest |x|, or 0 for no elements."""
        return self.ops.max_abs(self.x if self.near is None or not len(self.near.index) else self.near.values)

    def mean(self) -> float:
        """Return the mean |x|, or 0 for no elements."""
        return float(self.ops.bucket_norms(self.x, len(self.x), "mean")[0]) if len(self.x) else 0.0

    def count_above(self, threshold: np.float32, enough: int) -> int:
        """Return the number of elements with |x| > threshold; if they are more than ``enough``, perhaps less than that.

        A number of ``enough`` or less is always right.
        """
        if self.near is None or threshold < self.low and len(self.near.index) <= enough:
            return self.ops.count_above(self.x, threshold)
        return len(self.near.index) if threshold < self.low else self.ops.count_above(self.near.values, threshold)

    def narrow(self, threshold: np.float32, count: int) -> None:
        """Note the ``count`` elements above a threshold if they are few: only they will be asked for from now on."""
        if self.near is None:
            if 4 * count < len(self.x):
                self.near, self.low = self._chosen(self.ops.first_above(self.x, threshold, count)), threshold
        elif threshold > self.low and 4 * count < len(self.near.index):
            self.near, self.low = self.above(threshold, count), threshold

    def above(self, threshold: np.float32, capacity: int) -> Sparse:
        """Return the first ``capacity`` elements with |x| > threshold."""
        if self.near is None or threshold < self.low:
            return self._chosen(self.ops.first_above(self.x, threshold, capacity))
        return self._among(self.ops.first_above(self.near.values, threshold, capacity))

    def equal(self, magnitude: np.float32, capacity: int) -> Sparse:
        """Return the first ``capacity`` elements with |x| = magnitude."""
        if self.near is None or magnitude <= self.low:
            return self._chosen(self.ops.first_equal(self.x, magnitude, capacity))
        return self._among(self.ops.first_equal(self.near.values, magnitude, capacity))

    def _chosen(self, index: Array) -> Sparse:
        return Sparse(index, self.ops.take(self.x, index))

    def _among(self, chosen: Array) -> Sparse:
        assert self.near is not None
        return Sparse(self.ops.take(self.near.index, chosen), self.ops.take(self.near.values, chosen))
