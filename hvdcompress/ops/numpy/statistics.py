"""Statistics: means, norms and other numbers about an array (documented in :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

import numpy as np

from hvdcompress.ops.scan import Norm
from hvdcompress.ops.shared import PIECE, moments_of
from hvdcompress.ops.vectors import FP32_MAX
from hvdcompress.ops.vectors import NumpyArray as Array

_SLICE = 1 << 15  # elements per slice: intermediate results stay in the processor's cache


def moments(x: Array) -> tuple[float, float]:
    return moments_of(x.sum(dtype=np.float64), np.square(x, dtype=np.float64).sum(), x.size)


def max_abs(x: Array) -> float:
    return float(np.abs(x).max(initial=0.0))


def l2_norm(x: Array) -> float:
    return float(np.sqrt(np.square(x, dtype=np.float64).sum()))


def bucket_norms(x: Array, bucket: int, norm: Norm) -> Array:
    bucket = max(1, min(bucket, x.size))
    out = np.zeros(-(-x.size // bucket), np.float32 if norm == "max" else np.float64)
    rows = max(1, _SLICE // bucket)
    for first in range(0, out.size, rows):
        part = x[first * bucket : (first + rows) * bucket]
        if norm == "max":
            out[first : first + rows] = np.maximum.reduceat(np.abs(part), np.arange(0, part.size, bucket))
            continue
        wide = np.zeros((-(-part.size // bucket), bucket))
        wide.reshape(-1)[: part.size] = part
        out[first : first + rows] = fold(np.square(wide, out=wide) if norm == "l2" else np.abs(wide, out=wide))
    return out if norm == "max" else norms_of(out, x.size, bucket, norm)


def fold(rows: Array) -> Array:
    """Return the sum of each row [m] of ``rows`` [m, width] float64, added in the spec's order; overwrites ``rows``."""
    count, width = rows.shape
    if width > PIECE:
        pieces = -(-width // PIECE)
        rows = np.pad(rows, ((0, 0), (0, pieces * PIECE - width)))
        return fold(fold(rows.reshape(-1, PIECE)).reshape(count, pieces))
    while width > 1:
        half = (width + 1) // 2
        rows[:, : width - half] += rows[:, half:width]
        width = half
    return rows[:, 0]


def norms_of(sums: Array, n: int, bucket: int, norm: Norm) -> Array:
    """Return the norms of buckets [m] float32, given Σx² ("l2") or Σ|x| ("mean") of each bucket [m] float64."""
    if norm == "mean":
        return (sums / np.minimum(bucket, n - bucket * np.arange(sums.size))).astype(np.float32)
    # a sum is at least its largest term, and every step rounds to nearest, so no |x| exceeds the norm
    return np.minimum(np.sqrt(sums), FP32_MAX).astype(np.float32)


def all_finite(x: Array) -> bool:
    if x.dtype == np.float64:
        return bool(np.isfinite(x).all())
    with np.errstate(invalid="ignore"):  # Inf − Inf is NaN, which is not finite either
        return bool(np.isfinite(x.sum(dtype=np.float64)))  # a float64 sum of finite float32 numbers cannot overflow


def all_below(index: Array, n: int) -> bool:
    return bool((index >= 0).all() and (index < n).all())
