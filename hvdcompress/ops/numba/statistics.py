"""Statistics, compiled: numbers about an array (see :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

import numpy as np

from hvdcompress.ops import numpy as reference
from hvdcompress.ops.numba._kernels import statistics as kernels
from hvdcompress.ops.numba.arrays import INF_BITS, plain
from hvdcompress.ops.numpy.statistics import fold, norms_of
from hvdcompress.ops.shared import PIECE, moments_of
from hvdcompress.ops.spec import Norm
from hvdcompress.ops.spec import NumpyArray as Array


def moments(x: Array) -> tuple[float, float]:
    if not plain(x):
        return reference.moments(x)
    total, squares = np.zeros(kernels.LANES), np.zeros(kernels.LANES)
    kernels.moments(x, total, squares)
    return moments_of(total.sum(), squares.sum(), x.size)


def spread(x: Array) -> tuple[float, float, float]:
    if not plain(x):
        return reference.spread(x)
    total, squares, most = np.zeros(kernels.LANES), np.zeros(kernels.LANES), np.zeros(kernels.LANES, np.int32)
    kernels.spread(x, x.view(np.int32), total, squares, most)
    mean, std = moments_of(total.sum(), squares.sum(), x.size)
    return mean, std, float(most.max().view(np.float32))


def max_abs(x: Array) -> float:
    return float(np.int32(kernels.largest(x.view(np.int32))).view(np.float32)) if plain(x) else reference.max_abs(x)


def bucket_norms(x: Array, bucket: int, norm: Norm) -> Array:
    if not x.size or not plain(x):
        return reference.bucket_norms(x, bucket, norm)
    bucket = min(bucket, x.size)
    out = np.empty(-(-x.size // bucket), np.float32)
    if norm == "max":
        kernels.bucket_max(x.view(np.int32), bucket, out.view(np.int32))
        return out
    sums = np.zeros((out.size, -(-bucket // PIECE)))
    kernels.piece_sums(x, bucket, norm == "l2", sums)
    return norms_of(fold(sums), x.size, bucket, norm)


def all_finite(x: Array) -> bool:
    return int(kernels.largest(x.view(np.int32))) < INF_BITS if plain(x) else reference.all_finite(x)
