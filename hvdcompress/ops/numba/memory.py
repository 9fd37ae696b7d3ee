"""Memory, compiled: read and write elements by index (see :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdcompress.ops import pool
from hvdcompress.ops.numba._kernels import memory as kernels
from hvdcompress.ops.numba.arrays import FLOAT32, INDICES, addresses, plain
from hvdcompress.ops.numpy import NumpyOps
from hvdcompress.ops.scan import Span
from hvdcompress.ops.shared import index_dtype
from hvdcompress.ops.vectors import NumpyArray as Array

INT8 = np.dtype(np.int8)
NO_TABLE, NO_ENTRIES = np.zeros(0, np.float32), np.zeros(0, np.int8)
#: dtype of the elements -> dtype of the same size with which the kernel copies them
WORDS: dict[Any, np.dtype[Any]] = {FLOAT32: FLOAT32, np.dtype(np.int32): FLOAT32, INT8: INT8}


def joined(arrays: Sequence[Array]) -> Array:
    """Concatenate arrays of one dtype, in memory of the pool."""
    out = pool.empty(sum(map(len, arrays)), arrays[0].dtype)
    return np.concatenate(arrays, out=out)


def _is_plain_index(index: Array) -> bool:
    return index.dtype in INDICES and plain(index, dtype=index.dtype)


def are_parts(parts: Sequence[Array], spans: Sequence[Span]) -> bool:
    """Return whether the kernels can read and write the parts of a vector, and the parts fit their spans."""
    sizes = [stop - start for start, stop in spans]
    return len(parts) > 0 and all(map(plain, parts)) and [part.size for part in parts] == sizes


class MemoryOps(NumpyOps):
    """Read and write elements by index."""

    def take(self, x: Array, index: Array) -> Array:
        if x.dtype not in WORDS or not plain(x, dtype=x.dtype) or not _is_plain_index(index):
            return super().take(x, index)
        out = pool.empty(index.size, x.dtype)
        word = WORDS[x.dtype]
        kernels.take(x.view(word), index, out.view(word))
        return out

    def take_parts(
        self,
        parts: Sequence[Array],
        spans: Sequence[Span],
        index: Array,
        table: Array | None = None,
        entries: Array | None = None,
    ) -> Array:
        table, entries = (NO_TABLE, NO_ENTRIES) if table is None or entries is None else (table, entries)
        if not (are_parts(parts, spans) and _is_plain_index(index) and plain(table) and plain(entries, dtype=INT8)):
            return super().take_parts(parts, spans, index, table, entries)
        values = pool.empty(index.size, FLOAT32)
        kernels.take_parts(addresses(parts), np.array(spans), index, table, entries, values)
        return values

    def add_parts(
        self, parts: Sequence[Array], spans: Sequence[Span], index: Array | None, values: Any, factor: float
    ) -> None:
        if index is None and are_parts(parts, spans) and are_parts(values, spans):
            kernels.add_whole_parts(addresses(parts), np.array(spans), addresses(values), np.float32(factor))
        elif index is not None and are_parts(parts, spans) and _is_plain_index(index) and plain(values):
            kernels.add_parts(addresses(parts), np.array(spans), index, values, np.float32(factor))
        else:
            super().add_parts(parts, spans, index, values, factor)

    def stamp(self, stamps: Array, now: int, index: Array, out: Array) -> Array:
        if not (plain(stamps, out, dtype=INT8) and _is_plain_index(index)):
            return super().stamp(stamps, now, index, out)
        ages = pool.empty(index.size, INT8)
        if not kernels.stamp(stamps, np.int8(now), index, out, ages):
            return super().stamp(stamps, now, index, out)
        return ages

    def distinct(self, index: Array, n: int) -> Array:
        if not _is_plain_index(index):
            return super().distinct(index, n)
        found = pool.empty(index.size, index_dtype(n))
        count = kernels.distinct(index, n, pool.empty(-(-n // 64), np.uint64), found)
        return found[:count]
