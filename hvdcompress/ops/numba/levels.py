"""Levels, compiled: values in units of a norm, rounded to a table (see :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from hvdcompress.ops import numpy as reference
from hvdcompress.ops.numba import coded
from hvdcompress.ops.numba._kernels import levels as kernels
from hvdcompress.ops.numba.arrays import plain
from hvdcompress.ops.numba.threads import in_ranges
from hvdcompress.ops.shared import filled, level_edges
from hvdcompress.ops.vectors import LevelCodes
from hvdcompress.ops.vectors import NumpyArray as Array


def encode_levels(
    x: Array, norms: Array, bucket: int, levels: Array, bits: int, key: Array | None = None, out: Array | None = None
) -> Array:
    codes = np.empty(-(-x.size * bits // 8), np.uint8) if out is None else out
    tables = _search_tables(levels.tobytes(), bits, key is None)
    if (
        norms.size * bucket < x.size
        or not plain(x)
        or not plain(norms)
        or not plain(codes, dtype=np.uint8)
        or not tables
    ):
        return reference.encode_levels(x, norms, bucket, levels, bits, key, out)
    random = key is not None, np.uint32(0) if key is None else key[0]
    given = x, norms, bucket, *tables, bits, *random, codes
    in_ranges(lambda start, stop: kernels.encode(*given, start, stop), x.size, kernels.BLOCK)
    return codes


def decode_levels(buffer: Array, norms: Array, bucket: int, levels: Array, bits: int, count: int) -> Array:
    out = np.empty(count, np.float32)
    if not coded.write(out, LevelCodes(buffer, norms, bucket, levels, bits, 0, count), 1.0):
        return reference.decode_levels(buffer, norms, bucket, levels, bits, count)
    return out


@lru_cache
def _search_tables(table: bytes, bits: int, nearest: bool) -> tuple[Array, Array] | None:
    """Return ``steps`` and ``pairs`` of ``kernels.encode`` for a table of levels, float32 as bytes.

    None if two edges are so near to each other that the kernel cannot tell between which of them a number is.
    """
    levels = np.frombuffer(table, np.float32)
    edges = (level_edges(levels, nearest) + np.float32(0)).view(np.uint32)  # −0 becomes 0
    edges = np.where(edges >> 31, ~edges, edges | np.uint32(1 << 31))  # unsigned integers in the edges' order
    at = edges >> 16
    if (at[1:] == at[:-1]).any():
        return None
    steps = np.searchsorted(at, np.arange(1 << 16)).astype(np.uint32) << 16
    steps[at] += np.uint32(0xFFFF) - (edges & np.uint32(0xFFFF))
    padded = filled(levels, (1 << bits) + 1)
    with np.errstate(invalid="ignore"):  # Inf − Inf: no code is beyond the last level
        pairs = np.stack([padded[:-1], padded[1:] - padded[:-1]], axis=1)
    return steps, pairs.view(np.uint64).ravel()
