"""Regions of a tensor, one for each rank, that move so that each has as many entries of a sparse vector.

They are kept as the edges of 64 equal shares of the entries, in units of the tensor's size, which serve any number of
ranks. All numbers are computed on the host in single operations, so that different processors get the same regions.
"""

from __future__ import annotations

import numpy as np

from hvdcompress.method import Array
from hvdcompress.ops.spec import Ops
from hvdcompress.ops.vectors import NumpyArray, dtype_name

SHARES = 64  #: number of shares; there are SHARES − 1 edges between them
PACE = 0.25  #: how much of the way the edges move in a step


def bounds(edges: NumpyArray, n: int, world_size: int) -> list[int]:
    """Return where each rank's region begins, and n. Edges that are all 0 stand for regions of equal size."""
    inside = edges if edges.any() else np.arange(1, SHARES) / SHARES
    ends = np.array([0, *inside, 1], np.float64)
    at = np.arange(1, world_size) * SHARES / world_size
    low = at.astype(int)
    inner = n * (ends[low] + (ends[low + 1] - ends[low]) * (at - low))
    return [0, *np.maximum.accumulate(inner.astype(int)).tolist(), n]


def cuts(index: Array, bounds: list[int], ops: Ops) -> list[int]:
    """Return where ascending indices reach each bound: ``index[cuts[r] : cuts[r + 1]]`` are those of region r."""
    # in the same dtype, because NumPy would convert all indices otherwise
    return ops.searchsorted(index, ops.asarray(np.array(bounds, dtype_name(index)), like=index)).tolist()


def moved(edges: NumpyArray, index: Array, n: int, ops: Ops) -> NumpyArray:
    """Return edges that are closer to those of equal shares of the entries.

    Args:
        edges: [SHARES − 1].
        index: of the entries, ascending.
        n: number of elements.
        ops: the array backend.
    """
    count = len(index)
    if not count:
        return edges
    chosen = ops.take(index, ops.asarray(np.arange(1, SHARES) * count // SHARES, like=index))
    now = np.array(chosen.tolist()) / n
    return (1 - PACE) * edges + PACE * now if edges.any() else now
