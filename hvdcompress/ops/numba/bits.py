"""Bits, compiled: numbers of a few bits, and bitmaps (see :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

import numpy as np

from hvdcompress.ops import numpy as reference
from hvdcompress.ops.numba._kernels import bits as kernels
from hvdcompress.ops.numba.arrays import int64, plain
from hvdcompress.ops.spec import NumpyArray as Array

_WIDEST = 56  # the kernels hold a number and a part of the next in 64 bits


def pack_bits(values: Array, width: int) -> Array:
    if not 0 < width <= _WIDEST:
        return reference.pack_bits(values, width)
    out = np.empty(-(-values.size * width // 8), np.uint8)
    kernels.pack_bits(int64(values), width, out)
    return out


def unpack_bits(buffer: Array, width: int, count: int) -> Array:
    if not 0 < width <= _WIDEST or not plain(buffer, dtype=np.uint8):
        return reference.unpack_bits(buffer, width, count)
    out = np.empty(count, np.int64)
    kernels.unpack_bits(buffer, width, out)
    return out


def set_bits(positions: Array, num_bits: int) -> Array:
    out = np.zeros(-(-num_bits // 8), np.uint8)
    kernels.set_bits(int64(positions), num_bits, out)
    return out


def find_bits(buffer: Array, num_bits: int) -> Array:
    if not plain(buffer, dtype=np.uint8):
        return reference.find_bits(buffer, num_bits)
    return kernels.find_bits(buffer[: -(-num_bits // 8)], num_bits)
