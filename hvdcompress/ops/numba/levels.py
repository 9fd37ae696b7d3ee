"""Levels, compiled: values in units of a norm, rounded to a table (see :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

import numpy as np

from hvdcompress.ops import numpy as reference
from hvdcompress.ops.numba._kernels import levels as kernels
from hvdcompress.ops.numba.arrays import plain
from hvdcompress.ops.numba.threads import in_ranges
from hvdcompress.ops.shared import between
from hvdcompress.ops.vectors import NumpyArray as Array


def encode_levels(
    x: Array, norms: Array, bucket: int, levels: Array, bits: int, key: Array | None = None, out: Array | None = None
) -> Array:
    codes = np.empty(-(-x.size * bits // 8), np.uint8) if out is None else out
    if norms.size * bucket < x.size or not plain(x) or not plain(norms) or not plain(codes, dtype=np.uint8):
        return reference.encode_levels(x, norms, bucket, levels, bits, key, out)
    below = np.nextafter(levels[1:], np.float32(-np.inf))
    edges = _filled(between(levels) if key is None else below, (1 << bits) - 1)
    random = key is not None, np.uint32(0) if key is None else key[0]
    given = x, norms, bucket, edges, _filled(levels, (1 << bits) + 1), bits, *random, codes
    in_ranges(lambda start, stop: kernels.encode(*given, start, stop), x.size, kernels.BLOCK)
    return codes


def decode_levels(buffer: Array, norms: Array, bucket: int, levels: Array, bits: int, count: int) -> Array:
    if norms.size * bucket < count or not plain(norms) or not plain(buffer, dtype=np.uint8):
        return reference.decode_levels(buffer, norms, bucket, levels, bits, count)
    if buffer.size < -(-count * bits // 8):
        return reference.decode_levels(buffer, norms, bucket, levels, bits, count)
    out = np.empty(count, np.float32)
    given = buffer, norms.view(np.int32), bucket, _filled(levels, 1 << bits, levels[-1]), bits, out
    in_ranges(lambda start, stop: kernels.decode(*given, start, stop), count, kernels.BLOCK)
    return out


def _filled(table: Array, size: int, value: float = np.inf) -> Array:
    """Extend a table to ``size`` entries."""
    return np.concatenate([table, np.full(size - table.size, value, np.float32)])
