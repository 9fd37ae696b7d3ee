"""Bits, compiled: integers of a few bits, and bitmaps (see :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

import numpy as np

from hvdcompress.ops import pool
from hvdcompress.ops.numba._kernels import bits as kernels
from hvdcompress.ops.numba.arrays import INDICES, int64, plain
from hvdcompress.ops.numpy import NumpyOps
from hvdcompress.ops.vectors import NumpyArray as Array

_MAX_WIDTH = 56  # the kernels hold an integer and up to 7 bits of another one in 64 bits


def _words(buffer: Array, num_bits: int) -> Array:
    """Copy the first bits of a buffer to uint32 words, with one more word than needed, and at least two.

    The kernel reads each integer together with the following word, even integers of 0 bits from an empty buffer.
    """
    words = pool.empty(max(-(-num_bits // 32), 1) + 1, np.uint32)
    part = buffer[: 4 * words.size - 4]
    room = words.view(np.uint8)
    room[: part.size] = part
    room[part.size :] = 0
    return words


class BitOps(NumpyOps):
    """Integers of a few bits, and bitmaps."""

    def pack_bits(self, values: Array, width: int) -> Array:
        if not 0 < width <= _MAX_WIDTH:
            return super().pack_bits(values, width)
        out = np.empty(-(-values.size * width // 8), np.uint8)
        kernels.pack_bits(int64(values), width, out)
        return out

    def unpack_bits(self, buffer: Array, width: int, count: int) -> Array:
        if not 0 < width <= 32 or not plain(buffer, dtype=np.uint8):
            return super().unpack_bits(buffer, width, count)
        out = np.empty(count, np.int64)
        kernels.unpack_bits(_words(buffer, count * width), width, out)
        return out

    def set_bits(self, positions: Array, num_bits: int) -> Array:
        out = np.zeros(-(-num_bits // 8), np.uint8)
        kernels.set_bits(int64(positions), num_bits, out)
        return out

    def elias_fano(self, index: Array, low: int, num_bits: int) -> tuple[Array, Array]:
        if not low <= _MAX_WIDTH or not plain(index, dtype=index.dtype) or index.dtype not in INDICES:
            return super().elias_fano(index, low, num_bits)
        lows = pool.empty(-(-index.size * low // 8), np.uint8)
        highs = pool.empty(-(-num_bits // 8), np.uint8)
        highs[:] = 0
        kernels.elias_fano(index, low, num_bits, lows, highs)
        return lows, highs

    def from_elias_fano(self, lows: Array, highs: Array, low: int, num_bits: int) -> Array:
        if low > 32 or not plain(lows, dtype=np.uint8) or not plain(highs, dtype=np.uint8):
            return super().from_elias_fano(lows, highs, low, num_bits)
        index = pool.empty(kernels.count_bits(highs, num_bits), np.int64)
        kernels.from_elias_fano(_words(lows, index.size * low), highs, low, index)
        return index
