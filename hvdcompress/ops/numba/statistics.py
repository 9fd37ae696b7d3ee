"""Statistics, compiled: means, norms and other numbers about an array (see :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

import math

import numpy as np

from hvdcompress.ops.numba._kernels import statistics as kernels
from hvdcompress.ops.numba.arrays import INF_BITS, plain
from hvdcompress.ops.numpy import NumpyOps
from hvdcompress.ops.scan import Norm
from hvdcompress.ops.shared import PIECE, moments_of
from hvdcompress.ops.vectors import FP32_MAX
from hvdcompress.ops.vectors import NumpyArray as Array


def _sums(x: Array) -> tuple[float, float]:
    """Return Σx and Σx², in float64."""
    total = np.zeros(kernels.LANES)
    squares = np.zeros(kernels.LANES)
    kernels.moments(x, total, squares)
    return float(total.sum()), float(squares.sum())


def sums_of(rows: Array) -> Array:
    """Return the sum of each row [m] of ``rows`` [m, width] float64, added in the spec's order; overwrites ``rows``."""
    out = np.empty(len(rows))
    kernels.add_rows(rows, out)
    return out


class StatisticsOps(NumpyOps):
    """Means, norms and other numbers about an array."""

    def moments(self, x: Array) -> tuple[float, float]:
        if not plain(x):
            return super().moments(x)
        return moments_of(*_sums(x), x.size)

    def l2_norm(self, x: Array) -> float:
        return math.sqrt(_sums(x)[1]) if plain(x) else super().l2_norm(x)

    def max_abs(self, x: Array) -> float:
        return float(np.int32(kernels.largest(x.view(np.int32))).view(np.float32)) if plain(x) else super().max_abs(x)

    def bucket_norms(self, x: Array, bucket: int, norm: Norm) -> Array:
        if not x.size or not plain(x):
            return super().bucket_norms(x, bucket, norm)
        bucket = min(bucket, x.size)
        out = np.empty(-(-x.size // bucket), np.float32)
        if norm == "max":
            kernels.bucket_max(x.view(np.int32), bucket, out.view(np.int32))
            return out
        sums = np.zeros((out.size, -(-bucket // PIECE)))
        kernels.piece_sums(x, bucket, norm == "l2", sums)
        total = sums_of(sums)
        if norm == "mean":
            return (total / np.minimum(bucket, x.size - bucket * np.arange(total.size))).astype(np.float32)
        return np.minimum(np.sqrt(total), FP32_MAX).astype(np.float32)  # see the reference

    def all_finite(self, x: Array) -> bool:
        return int(kernels.largest(x.view(np.int32))) < INF_BITS if plain(x) else super().all_finite(x)
