"""Levels, compiled: values in units of a norm, rounded to a table (see :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from hvdcompress.ops import numpy as reference
from hvdcompress.ops.numba._kernels import levels as kernels
from hvdcompress.ops.numba.arrays import plain
from hvdcompress.ops.numba.threads import in_ranges
from hvdcompress.ops.shared import filled, level_edges
from hvdcompress.ops.vectors import NumpyArray as Array


def encode_levels(
    x: Array, norms: Array, bucket: int, levels: Array, bits: int, key: Array | None = None, out: Array | None = None
) -> Array:
    codes = np.empty(-(-x.size * bits // 8), np.uint8) if out is None else out
    if norms.size * bucket < x.size or not plain(x) or not plain(norms) or not plain(codes, dtype=np.uint8):
        return reference.encode_levels(x, norms, bucket, levels, bits, key, out)
    edges, least = _search_tables(levels.tobytes(), bits, key is None)
    random = key is not None, np.uint32(0) if key is None else key[0]
    given = x, norms, bucket, edges, least, filled(levels, (1 << bits) + 1), bits, *random, codes
    in_ranges(lambda start, stop: kernels.encode(*given, start, stop), x.size, kernels.BLOCK)
    return codes


def decode_levels(buffer: Array, norms: Array, bucket: int, levels: Array, bits: int, count: int) -> Array:
    if norms.size * bucket < count or not plain(norms) or not plain(buffer, dtype=np.uint8):
        return reference.decode_levels(buffer, norms, bucket, levels, bits, count)
    if buffer.size < -(-count * bits // 8):
        return reference.decode_levels(buffer, norms, bucket, levels, bits, count)
    out = np.empty(count, np.float32)
    given = buffer, norms.view(np.int32), bucket, filled(levels, 1 << bits, levels[-1]), bits, out
    in_ranges(lambda start, stop: kernels.decode(*given, start, stop), count, kernels.BLOCK)
    return out


@lru_cache
def _search_tables(table: bytes, bits: int, nearest: bool) -> tuple[Array, Array]:
    """Return ``edges`` and ``least`` of ``kernels.encode`` for a table of levels, float32 as bytes."""
    levels = np.frombuffer(table, np.float32)
    edges = level_edges(levels, nearest)
    # Of the 2^16 floats that share their upper bits, those with the lower bits 0 and 0xFFFF are the ends
    ends = (np.arange(1 << 16, dtype=np.uint32) << 16 | np.array([[0], [0xFFFF]], np.uint32)).view(np.float32)
    below = np.searchsorted(edges, ends)
    finite = np.isfinite(ends).all(axis=0)
    alone = (np.abs(below[1] - below[0]) <= 1)[finite].all()
    least = below.min(axis=0).astype(np.uint16) if alone else np.empty(0, np.uint16)
    return filled(edges, 1 << bits), least
