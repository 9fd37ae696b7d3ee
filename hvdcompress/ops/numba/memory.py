"""Memory, compiled: take and set elements by their indices (see :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdcompress.ops import numpy as reference
from hvdcompress.ops import pool
from hvdcompress.ops.numba._kernels import memory as kernels
from hvdcompress.ops.numba.arrays import FLOAT32, INDICES, plain
from hvdcompress.ops.vectors import NumpyArray as Array

INT8 = np.dtype(np.int8)
#: dtypes whose elements are moved, and those that the kernel moves them as
WORDS: dict[Any, np.dtype[Any]] = {FLOAT32: FLOAT32, np.dtype(np.int32): FLOAT32, INT8: INT8}


def joined(arrays: Sequence[Array]) -> Array:
    """Return arrays of one dtype as one, in memory that was in use before."""
    out = pool.empty(sum(map(len, arrays)), arrays[0].dtype)
    return np.concatenate(arrays, out=out)


def take(x: Array, index: Array) -> Array:
    if x.dtype not in WORDS or not plain(x, dtype=x.dtype) or not _is_plain_index(index):
        return reference.take(x, index)
    out = pool.empty(index.size, x.dtype)
    word = WORDS[x.dtype]
    kernels.take(x.view(word), index, out.view(word))
    return out


def take_by_age(table: Array, stamps: Array, now: int, index: Array | None = None) -> Array:
    usable = plain(table) and plain(stamps, dtype=INT8) and (index is None or _is_plain_index(index))
    if not usable:
        return reference.take_by_age(table, stamps, now, index)
    out = pool.empty(stamps.size if index is None else index.size, FLOAT32)
    if index is None:
        kernels.take_by_age(table, stamps, np.int8(now), out)
    else:
        kernels.take_by_age_at(table, stamps, np.int8(now), index, out)
    return out


def set_at(x: Array, index: Array, value: float) -> None:
    if x.dtype not in WORDS or not plain(x, dtype=x.dtype) or not _is_plain_index(index):
        reference.set_at(x, index, value)
        return
    kernels.set_at(x, index, x.dtype.type(value))


def _is_plain_index(index: Array) -> bool:
    return index.dtype in INDICES and plain(index, dtype=index.dtype)
