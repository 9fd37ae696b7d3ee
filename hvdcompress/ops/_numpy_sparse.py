"""The reference's verbs for sparse vectors and for thresholds: merging two, the k-th magnitude, the norm."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdcompress.method import Sparse

__all__ = ["kth_magnitude", "l2_norm", "merge"]

Array = np.ndarray[Any, Any]


def merge(a: Sparse, b: Sparse, n: int) -> Sparse:
    """a + b: distinct ascending indices below n, and values [m] float32; each of a and b has distinct indices.

    No place gets more than two values, and a sum of two is the same in either order: no device can differ.
    """
    index, place = np.unique(np.concatenate([a.index, b.index]), return_inverse=True)
    values = np.zeros(index.size, np.float32)
    np.add.at(values, place, np.concatenate([a.values, b.values]))
    return Sparse(index.astype("int32" if n < 2**31 else "int64"), values)


def kth_magnitude(x: Array, k: int) -> float:
    """The k-th largest |x|, 1 ≤ k ≤ n (0 for an empty array)."""
    return float(np.partition(np.abs(x), x.size - k)[x.size - k]) if x.size else 0.0


def l2_norm(x: Array) -> float:
    """‖x‖ of float32, summed in float64, in which no float32's square overflows or vanishes."""
    return float(np.sqrt(np.square(x, dtype=np.float64).sum()))
