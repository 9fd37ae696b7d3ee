"""How many to keep, and which."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import numpy as np

from hvdcompress.method import Array, Sparse

#: (x, first threshold, k, capacity, ops) -> (threshold, magnitude of the entries that may fill up, or None)
Refine = Callable[[Array, np.float32, int, int, Any], tuple[np.float32, np.float32 | None]]


def kept(density: float, n: int) -> int:
    """k = min(n, max(1, floor(n·density))), the same rule in every method."""
    # 0.29·100 is 28.999999999999996: the tolerance keeps floor() at what was meant
    return min(n, max(1, math.floor(n * density * (1 + 1e-12))))


def chunk_size(density: float) -> int:
    """C = 1/density elements a chunk, of which one is kept."""
    return max(1, round(1.0 / density))


def gaussian_threshold(mean: float, std: float, density: float) -> float:
    """|μ| + z·σ with z = Φ⁻¹(1 − density/2): a share ``density`` of N(0, σ²) lies beyond ±zσ."""
    return abs(mean) + NormalDist().inv_cdf(1.0 - min(density, 1.0 - 1e-9) / 2.0) * std


def just_below(magnitude: float) -> np.float32:
    """The largest float32 below a magnitude: the threshold that it just passes (0 for 0)."""
    return np.nextafter(np.float32(magnitude), np.float32(0))


def refine_paper(x: Array, start: np.float32, k: int, capacity: int, ops: Any) -> tuple[np.float32, None]:
    """Up to three corrections of the threshold, as the authors of Gaussian-k do (Shi et al. 2019, Alg. 1)."""
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


def refine_bisect(x: Array, start: np.float32, k: int, capacity: int, ops: Any) -> tuple[np.float32, np.float32 | None]:
    """A threshold t with 2k/3 ≤ #{|x| > t} ≤ capacity, by bisecting its bit pattern (31 halvings at most).

    The patterns of non-negative floats ascend with the floats, so a step halves the *floats* that are left,
    and the search ends whatever the distribution. Where equal magnitudes straddle the bound there is no such
    t: then the two neighbouring floats (t, t') are returned, with #{|x| > t} too few and #{|x| > t'} too many;
    elements of magnitude t fill up.
    """
    low, high = -1, int(np.float32(ops.max_abs(x)).view(np.int32))  # count too large at low, too small at high
    middle, stride = int(np.float32(start).view(np.int32)), 1 << 22  # half an octave
    while high - low > 1:
        if not low < middle < high:
            middle = (low + high) // 2
        threshold = np.int32(middle).view(np.float32)
        count = ops.count_above(x, threshold)
        if count > capacity:
            low = middle
            if 4 * count < len(x):  # what is below will never be counted again: look at the rest alone
                x = ops.take(x, ops.first_above(x, threshold, count))
        elif 3 * count < 2 * k:
            high = middle
        else:
            return threshold, None
        # the start is nearly right: stride away from it, ever wider, until the answer is bracketed
        middle, stride = (high - stride, 2 * stride) if low < 0 else ((low + high) // 2, stride)
    threshold = np.int32(high).view(np.float32)
    return threshold, threshold if high > 0 else None


def capacity(density: float, n: int) -> int:
    """⌊4k/3⌋ ≤ n: the slots of a payload whose entries are those beyond a threshold."""
    return min(n, max(1, 4 * kept(density, n) // 3))


def beyond(x: Array, start: np.float32, density: float, refine: Refine, ops: Any) -> Array:
    """Indices [c] ascending of the entries beyond a threshold which ``refine`` finds from ``start`` on.

    c ≤ capacity, and with bisection 2k/3 ≤ c wherever so many entries are non-zero.
    """
    k, room = kept(density, len(x)), capacity(density, len(x))
    threshold, below = refine(x, start, k, room, ops)
    index = ops.first_above(x, threshold, room)
    if below is not None and len(index) < k:  # ties straddle the bound: fill up with the equal ones
        ties = ops.first_equal(x, below, k - len(index))
        index = ops.sort(ops.concat([index, ties]))
    return index


def pad(chosen: Sparse, capacity: int, ops: Any) -> Sparse:
    """``chosen`` brought to ``capacity`` entries by repeating its last index with the value 0."""
    missing = capacity - len(chosen.index)
    if missing == 0:
        return chosen
    last = chosen.index[-1:] if len(chosen.index) else ops.zeros(1, "int32", like=chosen.values)
    index = ops.concat([chosen.index, ops.take(last, ops.zeros(missing, "int64", like=last))])
    return Sparse(index, ops.concat([chosen.values, ops.zeros(missing, "float32", like=chosen.values)]))
