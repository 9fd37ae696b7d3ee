"""Selection: the number k of elements to keep, thresholds, and the elements above a threshold."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from hvdcompress.method import Array, Context, Density, FeedbackName, Method, Sparse, Values, Workspace
from hvdcompress.ops.shared import index_dtype
from hvdcompress.ops.spec import Ops
from hvdcompress.parts import candidates
from hvdcompress.parts.candidates import Elements


@dataclass(frozen=True, kw_only=True)
class SparseMethod(Method):
    """Base class of methods that select elements of the gradient and send their values."""

    sparse = True
    needs_feedback = True

    density: Density = 0.01
    """Fraction of the elements that each rank sends, k / n."""
    values: Values = "fp32"
    """Number format of the values."""
    feedback: FeedbackName = "plain"


class Wanted(NamedTuple):
    """The number of elements that should be above a threshold.

    Attributes:
        k: the target.
        least: the minimum.
        most: the maximum; also the number of entries of the payload.
    """

    k: int
    least: int
    most: int


#: Finds a threshold for elements. Returns it, and the magnitude of elements that may fill up the selection, or None
Refine = Callable[[Elements], tuple[np.float32, np.float32 | None]]


@lru_cache(4096)
def num_kept(density: float, n: int) -> int:
    """Return k = min(n, max(1, ⌊n·density⌋)), the rule of all methods."""
    # The tolerance corrects rounding: 0.29·100 is 28.999999999999996 in floating point
    return min(n, max(1, math.floor(n * density * (1 + 1e-12))))


def largest(x: Array, counts: Sequence[int], ctx: Context, work: Workspace) -> Sparse:
    """Select the elements with the largest |x| in each part of the vector, exactly.

    Args:
        x: [n].
        counts: number of elements for each part in ``ctx.spec.parts``, or [k] for the whole vector.
        ctx: the tensor, or the bucket.
        work: the workspace; ``work.scanned`` may contain candidates, see :func:`candidates.scan`.

    Returns:
        The elements [Σ counts], in ascending order of their indices.
    """
    ops = work.ops
    sizes = ctx.spec.parts if len(counts) > 1 else (len(x),)
    if not isinstance(x, np.ndarray):  # on a device, reading thresholds costs more than candidates save
        index = ops.top_k_parts(x, counts, sizes) if len(sizes) > 1 else ops.top_k(x, *counts)
        return Sparse(index, ops.take(x, index))
    starts = list(itertools.accumulate(sizes[:-1], initial=0))
    noted = [candidates.recorded(index, work) for index in range(len(sizes))]
    enough: list[Sparse] = []
    for near, k, start, size in zip(noted, counts, starts, sizes, strict=True):
        if near is None or len(near.index) < k:
            part = x[start : start + size]
            strongest = ops.top_k(part, k)
            near = Sparse(strongest, ops.take(part, strongest))
        enough.append(near)
    chosen, least = ops.largest_of(enough, counts, starts)
    known = candidates.thresholds(ctx, work)
    for index, (near, k, threshold) in enumerate(zip(noted, counts, least.tolist(), strict=True)):
        if k:
            candidates.remember(known[:, index], threshold, k, None if near is None else len(near.index), k)
    return chosen


def elements_of_rows(chosen: Array, m: int, n: int, like: Array, ops: Ops) -> Array:
    """Return the indices of all elements of some rows of ``m`` elements, and of the n mod m after the last row.

    Args:
        chosen: the rows [K].
        m: elements of a row.
        n: elements of the tensor.
        like: an array of the backend and device.
        ops: the array ops.

    Returns:
        [K·m + n mod m], in the dtype of ``index_dtype(n)``.
    """
    rows, dtype = n // m, index_dtype(n)

    def indices(*bounds: int) -> Array:
        return ops.asarray(np.arange(*bounds, dtype=dtype), like=like)

    starts = ops.take(indices(0, rows * m, m), chosen)
    return ops.concat([(starts.reshape(-1, 1) + indices(m)).reshape(-1), indices(rows * m, n)])


def chunk_size(density: float) -> int:
    """Return C = 1/density, the number of elements per chunk, of which one is kept."""
    return max(1, round(1.0 / density))


def gaussian_threshold(mean: float, std: float, density: float) -> float:
    """Return |μ| + z·σ with z = Φ⁻¹(1 − density/2). For N(0, σ²), the fraction ``density`` is outside of ±z·σ."""
    return abs(mean) + NormalDist().inv_cdf(1.0 - min(density, 1.0 - 1e-9) / 2.0) * std


def just_below(magnitude: float) -> np.float32:
    """Return the largest float32 below a magnitude (0 for 0): the highest threshold that the magnitude exceeds."""
    return np.nextafter(np.float32(magnitude), np.float32(0))


def refine_paper(elements: Elements, start: np.float32, wanted: Wanted) -> tuple[np.float32, None]:
    """Correct a threshold up to two times, as in Gaussian-k (Shi et al. 2019, Alg. 1, and the authors' code).

    Their loop computes a mask and then changes the threshold, three times. The last mask is sent, and it was computed
    before the third change. So only two changes have an effect.

    Args:
        elements: the elements of x.
        start: the first threshold.
        wanted: the limits; see :func:`gaussiank_limits`.

    Returns:
        The threshold, and None: ties are not filled up.
    """
    threshold = start
    for _ in range(2):
        count = elements.count_above(threshold, wanted.most)
        if count < wanted.least:
            threshold *= np.float32(0.5)
        elif count > wanted.most:
            threshold *= np.float32(1.5)
        else:
            break
    return threshold, None


def refine_bisect(elements: Elements, start: np.float32, wanted: Wanted) -> tuple[np.float32, np.float32 | None]:
    """Find a threshold t with least ≤ #{|x| > t} ≤ most by bisecting its bit pattern, in at most 31 steps.

    The bit patterns of non-negative floats ascend with their values. Each step halves the number of remaining *floats*,
    so the search ends for any distribution. If many elements have the same magnitude, such a t may not exist. The
    result is then the smallest t with too few elements above it, and elements of magnitude t may fill up the selection.

    Args:
        elements: the elements of x.
        start: the first threshold; a good estimate saves steps.
        wanted: the limits for the number of elements.

    Returns:
        The threshold t, and the magnitude of the elements that may fill up; None if enough elements are above t.
    """
    # Invariant: too many elements are above low, and too few above high
    low = -1
    high = int(np.float32(elements.largest()).view(np.int32))
    middle = int(np.float32(start).view(np.int32))
    stride = 1 << 22  # half an octave, in bit patterns
    while high - low > 1:
        if not low < middle < high:
            middle = (low + high) // 2
        threshold = np.int32(middle).view(np.float32)
        count = elements.count_above(threshold, wanted.most)
        if count > wanted.most:
            low = middle
            elements.narrow(threshold, count)
        elif count < wanted.least:
            high = middle
        else:
            return threshold, None
        # The start is a good estimate: move away from it in growing strides until the answer is bracketed
        middle, stride = (high - stride, 2 * stride) if low < 0 else ((low + high) // 2, stride)
    threshold = np.int32(high).view(np.float32)
    return threshold, threshold if high > 0 else None


def capacity(density: float, n: int) -> int:
    """Return ⌊4k/3⌋ (at most n), the number of entries in the payload of a method with a threshold."""
    return min(n, max(1, 4 * num_kept(density, n) // 3))


def gaussiank_limits(density: float, n: int) -> Wanted:
    """Return the limits of Gaussian-k: 2k/3 to 4k/3 elements."""
    k = num_kept(density, n)
    return Wanted(k, -(-2 * k // 3), capacity(density, n))


def above_threshold(
    x: Array, wanted: Wanted, refine: Refine, index: int, ctx: Context, work: Workspace
) -> tuple[Sparse, np.float32]:
    """Select the elements above a threshold.

    Args:
        x: float32 [n].
        wanted: the number of elements that should be above the threshold.
        refine: finds the threshold, for example by :func:`refine_bisect`.
        index: index of the part x of the bucket's vector.
        ctx: the tensor, or the bucket.
        work: the workspace; ``work.scanned`` may contain candidates, see :func:`candidates.scan`.

    Returns:
        The elements [c] in ascending order of their indices, with c ≤ most, and the threshold. With bisection c ≥
        least, unless fewer elements are non-zero.
    """
    ops = work.ops
    near = candidates.recorded(index, work)
    elements = candidates.Elements(x, near, candidates.scan(wanted.most + 1, index, work).above, ops)
    threshold, below = refine(elements)
    chosen = elements.above(threshold, wanted.most)
    if isinstance(x, np.ndarray):  # on a device, candidates cost more than they save
        noted = None if near is None else len(near.index)
        known = candidates.thresholds(ctx, work)[:, index]
        candidates.remember(known, float(threshold), len(chosen.index), noted, wanted.most + 1)
    if below is not None and len(chosen.index) < wanted.k:
        # Fill up with the first elements of the threshold's magnitude
        ties = elements.equal(below, wanted.k - len(chosen.index))
        filled = ops.sort(ops.concat([chosen.index, ties.index]))
        chosen = Sparse(filled, ops.take(x, filled))
    return chosen, threshold


def pad(chosen: Sparse, capacity: int, ops: Ops) -> Sparse:
    """Extend ``chosen`` to ``capacity`` entries by repeating its last index with the value 0."""
    missing = capacity - len(chosen.index)
    if missing == 0:
        return chosen
    last = chosen.index[-1:] if len(chosen.index) else ops.zeros(1, "int32", like=chosen.values)
    index = ops.concat([chosen.index, ops.take(last, ops.zeros(missing, "int64", like=last))])
    return Sparse(index, ops.concat([chosen.values, ops.zeros(missing, "float32", like=chosen.values)]))
