"""How many elements to keep, and which: k, thresholds, and selection by a threshold."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np

from hvdcompress.method import Array, Context, Sparse
from hvdcompress.ops.spec import Ops

#: Refines a threshold: (x, start, k, capacity, ops) -> (threshold, magnitude of elements that may fill up, or None).
Refine = Callable[[Array, np.float32, int, int, Any], tuple[np.float32, np.float32 | None]]

THRESHOLDS = (
    "thresholds"  #: in ``ctx.scratch``, float32 [3, parts]: the k-th magnitude of each part in the last step and
)
# in the one before, and by how much the next may be less than expected and its elements still be among the candidates
SLACK, MOST_SLACK, LEAST_SLACK = 0.1, 0.5, 0.005
MANY = 3  #: candidates are too many if they are so many times k
ROOM = 16  #: and are not noted if they are so many


def num_kept(density: float, n: int) -> int:
    """Return k = min(n, max(1, ⌊n·density⌋)), the rule of every method."""
    # the tolerance corrects rounding: 0.29·100 is 28.999999999999996 in floating point
    return min(n, max(1, math.floor(n * density * (1 + 1e-12))))


def scan_candidates(
    density: float,
    gradient: Array,
    residual: Array,
    scale: float,
    out: Array,
    place: int,
    ctx: Context,
    ops: Ops,
    clear: bool,
) -> tuple[bool, Sparse | None]:
    """Do ``Method.scan`` and note which elements may be among the k largest, by the last steps' thresholds.

    Where the k-th magnitude is not much less than expected, :func:`largest` need not look at the others.

    Returns:
        Whether ``out`` is finite, and the candidates, or None if they are not known.
    """
    thresholds = ctx.scratch.get(THRESHOLDS)
    if thresholds is None or not thresholds[0, place] > 0:
        return ops.accumulate(gradient, residual, scale, out, clear), None
    now, before, slack = thresholds[:, place].tolist()
    expected = now + max(now - before, -now) / 2 if before else now  # as residuals grow, so does it
    room = ROOM * num_kept(density, len(out)) + 64
    low = np.float32((1.0 - slack) * expected)
    finite, candidates = ops.accumulate_above(gradient, residual, scale, out, low, room, clear)
    return finite, candidates if len(candidates.index) < room else None


def largest(x: Array, counts: Sequence[int], ctx: Context, ops: Ops) -> Sparse:
    """Select the largest |x| of each part of the vector, exactly.

    Args:
        x: [n].
        counts: how many of each part in ``ctx.spec.parts``.
        ctx: ``ctx.scanned`` may have candidates, from :func:`scan_candidates`.
        ops: the array backend.

    Returns:
        The elements [Σ counts], their indices ascending.
    """
    known = ctx.scratch.get(THRESHOLDS)
    thresholds = np.full((3, len(counts)), SLACK, np.float32)
    thresholds[1] = 0 if known is None else known[0]
    on_host = isinstance(x, np.ndarray)  # on a device, to ask for thresholds would cost more than it saves
    found, start = [], 0
    for place, (k, size) in enumerate(zip(counts, ctx.spec.parts, strict=True)):
        candidates: Sparse | None = ctx.scanned[place] if ctx.scanned else None
        if known is not None:
            thresholds[2, place] = _slack(known[2, place], candidates, k)
        if candidates is None or len(candidates.index) < k:
            part = x[start : start + size]
            index = ops.top_k(part, k)
            candidates = Sparse(index, ops.take(part, index))
        if k:
            candidates, threshold = ops.largest_of(candidates, k)
            thresholds[0, place] = threshold if on_host else 0
        found.append(Sparse(candidates.index + start, candidates.values) if start else candidates)
        start += size
    if on_host:
        ctx.scratch[THRESHOLDS] = thresholds
    return found[0] if len(found) == 1 else Sparse(*(ops.concat(list(each)) for each in zip(*found, strict=True)))


def _slack(slack: float, candidates: Sparse | None, k: int) -> float:
    """The next step's slack: less where candidates were too many, more where they were too few."""
    if candidates is None or len(candidates.index) > MANY * k:
        return max(slack / 2, LEAST_SLACK)
    return min(slack * 2, MOST_SLACK) if len(candidates.index) < k else slack


def chunk_size(density: float) -> int:
    """Return C = 1/density, the elements of a chunk of which one is kept."""
    return max(1, round(1.0 / density))


def gaussian_threshold(mean: float, std: float, density: float) -> float:
    """Return |μ| + z·σ with z = Φ⁻¹(1 − density/2). Of N(0, σ²), the fraction ``density`` lies beyond ±z·σ."""
    return abs(mean) + NormalDist().inv_cdf(1.0 - min(density, 1.0 - 1e-9) / 2.0) * std


def just_below(magnitude: float) -> np.float32:
    """Return the largest float32 below a magnitude: the highest threshold that it exceeds (0 for 0)."""
    return np.nextafter(np.float32(magnitude), np.float32(0))


def refine_paper(x: Array, start: np.float32, k: int, capacity: int, ops: Ops) -> tuple[np.float32, None]:
    """Correct a threshold up to three times, as the authors of Gaussian-k do (Shi et al. 2019, Alg. 1).

    Args:
        x: float32 [n].
        start: the first threshold.
        k: the number of elements wanted above it.
        capacity: not used.
        ops: the array backend.

    Returns:
        The threshold, and None.
    """
    threshold = start
    for _ in range(3):
        count = ops.count_above(x, threshold)
        if 3 * count < 2 * k:
            threshold *= np.float32(0.5)
        elif 3 * count > 4 * k:
            threshold *= np.float32(1.5)
        else:
            break
    return threshold, None


def refine_bisect(x: Array, start: np.float32, k: int, capacity: int, ops: Ops) -> tuple[np.float32, np.float32 | None]:
    """Find a threshold t with 2k/3 ≤ #{|x| > t} ≤ capacity by bisecting its bit pattern, in at most 31 steps.

    The bit patterns of non-negative floats ascend with their values, so each step halves the number of *floats* that
    are left, and the search ends for any distribution. If many elements have the same magnitude there may be no such
    t. Then the result is the least t with too few elements above it, and elements of magnitude t may fill up.

    Args:
        x: float32 [n].
        start: the first threshold; a good estimate saves steps.
        k: the number of elements wanted above it.
        capacity: the largest number of elements allowed above it.
        ops: the array backend.

    Returns:
        The threshold t, and the magnitude of the elements that may fill up: None if enough are above t.
    """
    low, high = -1, int(np.float32(ops.max_abs(x)).view(np.int32))  # too many above low, too few above high
    middle, stride = int(np.float32(start).view(np.int32)), 1 << 22  # half an octave, in bit patterns
    while high - low > 1:
        if not low < middle < high:
            middle = (low + high) // 2
        threshold = np.int32(middle).view(np.float32)
        count = ops.count_above(x, threshold)
        if count > capacity:
            low = middle
            if 4 * count < len(x):  # elements below will never be counted again: continue with the others
                x = ops.take(x, ops.first_above(x, threshold, count))
        elif 3 * count < 2 * k:
            high = middle
        else:
            return threshold, None
        # the start is a good estimate: move away from it in growing strides until the answer is bracketed
        middle, stride = (high - stride, 2 * stride) if low < 0 else ((low + high) // 2, stride)
    threshold = np.int32(high).view(np.float32)
    return threshold, threshold if high > 0 else None


def capacity(density: float, n: int) -> int:
    """Return ⌊4k/3⌋ (at most n), the number of entries in the payload of a method that selects by a threshold."""
    return min(n, max(1, 4 * num_kept(density, n) // 3))


def above_threshold(x: Array, start: np.float32, density: float, refine: Refine, ops: Ops) -> Array:
    """Select the elements above a threshold.

    Args:
        x: float32 [n].
        start: the first threshold.
        density: target fraction of the elements, k / n.
        refine: :func:`refine_bisect` or :func:`refine_paper`.
        ops: the array backend.

    Returns:
        Indices [c], ascending, with c ≤ ⌊4k/3⌋. With bisection c ≥ 2k/3, unless fewer elements are non-zero.
    """
    k, room = num_kept(density, len(x)), capacity(density, len(x))
    threshold, below = refine(x, start, k, room, ops)
    index = ops.first_above(x, threshold, room)
    if below is not None and len(index) < k:  # elements of equal magnitude: fill up with the first of them
        ties = ops.first_equal(x, below, k - len(index))
        index = ops.sort(ops.concat([index, ties]))
    return index


def pad(chosen: Sparse, capacity: int, ops: Ops) -> Sparse:
    """Fill ``chosen`` up to ``capacity`` entries by repeating its last index with the value 0."""
    missing = capacity - len(chosen.index)
    if missing == 0:
        return chosen
    last = chosen.index[-1:] if len(chosen.index) else ops.zeros(1, "int32", like=chosen.values)
    index = ops.concat([chosen.index, ops.take(last, ops.zeros(missing, "int64", like=last))])
    return Sparse(index, ops.concat([chosen.values, ops.zeros(missing, "float32", like=chosen.values)]))
