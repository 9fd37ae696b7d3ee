"""Memory, compiled: take elements by their indices (see :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdcompress.ops import numpy as reference
from hvdcompress.ops import pool
from hvdcompress.ops.numba._kernels import memory as kernels
from hvdcompress.ops.numba.arrays import plain
from hvdcompress.ops.vectors import NumpyArray as Array


def joined(arrays: Sequence[Array]) -> Array:
    """Return arrays of one dtype as one, in memory that was in use before."""
    out = pool.empty(sum(map(len, arrays)), arrays[0].dtype)
    return np.concatenate(arrays, out=out)


def take(x: Array, index: Array) -> Array:
    if not plain(x) or index.dtype not in (np.int32, np.int64) or not plain(index, dtype=index.dtype):
        return reference.take(x, index)
    out = pool.empty(index.size, x.dtype)
    kernels.take(x, index, out)
    return out
