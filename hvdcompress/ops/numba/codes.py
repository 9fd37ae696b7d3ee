"""Codes, compiled: stochastic rounding and packed fields (see :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from hvdcompress.ops import pool
from hvdcompress.ops.numba._kernels import codes as kernels
from hvdcompress.ops.numba._kernels import levels as levels_kernels
from hvdcompress.ops.numba.arrays import ONE, plain
from hvdcompress.ops.numba.threads import in_ranges
from hvdcompress.ops.numpy import NumpyOps
from hvdcompress.ops.shared import filled, half_bits, index_dtype, level_edges, round_keys
from hvdcompress.ops.vectors import NumpyArray as Array


def _fits(x: Array, norms: Array, bucket: int, codes: Array) -> bool:
    enough = norms.size * bucket >= x.size
    return enough and plain(x) and plain(norms) and plain(codes, dtype=np.uint8)


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


class CodeOps(NumpyOps):
    """Stochastic rounding and packed fields."""

    def distinct_indices(self, key: Array, k: int, n: int) -> Array:
        out = pool.empty(k, index_dtype(n))
        kernels.distinct_indices(half_bits(n), round_keys(key), n, out)
        out.sort()
        return out

    def quantize(self, x: Array, norms: Array, bucket: int, bits: int, key: Array, out: Array | None = None) -> Array:
        codes = np.empty(-(-x.size * bits // 8), np.uint8) if out is None else out
        if not _fits(x, norms, bucket, codes):
            return super().quantize(x, norms, bucket, bits, key, out)
        given = x, x.view(np.int32), norms, bucket, bits, key[0], codes
        in_ranges(lambda start, stop: kernels.quantize(*given, start, stop), x.size, kernels.BLOCK)
        return codes

    def quantize_fields(
        self, x: Array, limit: float, norm: Array, width: int, key: Array, out: Array | None = None
    ) -> Array:
        words = np.empty(-(-x.size // (32 // width)), np.int32) if out is None else out
        if not x.size or not plain(x) or not plain(words, dtype=np.int32) or words.size != -(-x.size // (32 // width)):
            return super().quantize_fields(x, limit, norm, width, key, out)
        unit = np.float32(norm[0])
        per = 32 // width
        given = x, np.float32(limit), unit if unit > 0 else ONE, width, key[0], words
        align = kernels.BLOCK // per * per
        in_ranges(lambda start, stop: kernels.quantize_fields(*given, start, stop), x.size, align)
        return words

    def encode_levels(
        self,
        x: Array,
        norms: Array,
        bucket: int,
        levels: Array,
        bits: int,
        key: Array | None = None,
        out: Array | None = None,
    ) -> Array:
        codes = np.empty(-(-x.size * bits // 8), np.uint8) if out is None else out
        tables = _search_tables(levels.tobytes(), bits, key is None)
        if not _fits(x, norms, bucket, codes) or not tables:
            return super().encode_levels(x, norms, bucket, levels, bits, key, out)
        random = key is not None, np.uint32(0) if key is None else key[0]
        given = x, norms, bucket, *tables, bits, *random, codes
        in_ranges(lambda start, stop: levels_kernels.encode(*given, start, stop), x.size, levels_kernels.BLOCK)
        return codes
