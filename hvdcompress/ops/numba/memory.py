"""Memory, compiled: read and write elements by index (see :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdcompress.ops import pool
from hvdcompress.ops.numba._kernels import memory as kernels
from hvdcompress.ops.numba.arrays import FLOAT32, INDICES, plain
from hvdcompress.ops.numpy import NumpyOps
from hvdcompress.ops.vectors import NumpyArray as Array

INT8 = np.dtype(np.int8)
#: dtype of the elements -> dtype of the same size with which the kernel copies them
WORDS: dict[Any, np.dtype[Any]] = {FLOAT32: FLOAT32, np.dtype(np.int32): FLOAT32, INT8: INT8}


def joined(arrays: Sequence[Array]) -> Array:
    """Concatenate arrays of one dtype, in memory of the pool."""
    out = pool.empty(sum(map(len, arrays)), arrays[0].dtype)
    return np.concatenate(arrays, out=out)


def _is_plain_index(index: Array) -> bool:
    return index.dtype in INDICES and plain(index, dtype=index.dtype)


class MemoryOps(NumpyOps):
    """Read and write elements by index."""

    def take(self, x: Array, index: Array) -> Array:
        if x.dtype not in WORDS or not plain(x, dtype=x.dtype) or not _is_plain_index(index):
            return super().take(x, index)
        out = pool.empty(index.size, x.dtype)
        word = WORDS[x.dtype]
        kernels.take(x.view(word), index, out.view(word))
        return out

    def stamp(self, stamps: Array, now: int, index: Array, out: Array) -> Array:
        if not (plain(stamps, out, dtype=INT8) and _is_plain_index(index)):
            return super().stamp(stamps, now, index, out)
        ages = pool.empty(index.size, INT8)
        kernels.stamp(stamps, np.int8(now), index, out, ages)
        return ages

    def distinct(self, index: Array, n: int) -> Array:
        if not _is_plain_index(index):
            return super().distinct(index, n)
        found = pool.empty(index.size, np.int64)
        count = kernels.distinct(index, n, pool.empty(-(-n // 64), np.uint64), found)
        return found[:count]
