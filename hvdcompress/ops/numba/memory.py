"""Memory, compiled: take elements by their indices (see :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdcompress.ops import numpy as reference
from hvdcompress.ops import pool
from hvdcompress.ops.numba._kernels import memory as kernels
from hvdcompress.ops.numba.arrays import FLOAT32, INDICES, plain
from hvdcompress.ops.vectors import NumpyArray as Array

#: dtypes whose elements are moved, and those that the kernel moves them as
WORDS: dict[Any, np.dtype[Any]] = {
    FLOAT32: FLOAT32,
    np.dtype(np.int32): FLOAT32,
    np.dtype(np.int16): np.dtype(np.int16),
}


def joined(arrays: Sequence[Array]) -> Array:
    """Return arrays of one dtype as one, in memory that was in use before."""
    out = pool.empty(sum(map(len, arrays)), arrays[0].dtype)
    return np.concatenate(arrays, out=out)


def take(x: Array, index: Array) -> Array:
    if x.dtype not in WORDS or index.dtype not in INDICES:
        return reference.take(x, index)
    if not (plain(x, dtype=x.dtype) and plain(index, dtype=index.dtype)):
        return reference.take(x, index)
    out = pool.empty(index.size, x.dtype)
    word = WORDS[x.dtype]
    kernels.take(x.view(word), index, out.view(word))
    return out
