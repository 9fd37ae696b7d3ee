"""Bits: integers of a few bits, and bitmaps (documented in :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

import numpy as np

from hvdcompress.ops.vectors import NumpyArray as Array


def pack_bits(values: Array, width: int) -> Array:
    if width == 0:
        return np.zeros(0, np.uint8)
    bits = values.astype(np.int64)[:, None] >> np.arange(width) & 1
    return np.packbits(bits.astype(np.uint8).ravel(), bitorder="little")


def unpack_bits(buffer: Array, width: int, count: int) -> Array:
    if width == 0:
        return np.zeros(count, np.int64)
    bits = bits_of(buffer, count * width).reshape(count, width)
    return bits.astype(np.int64) @ (np.int64(1) << np.arange(width, dtype=np.int64))


def set_bits(positions: Array, num_bits: int) -> Array:
    bits = np.zeros(num_bits, np.uint8)
    bits[positions] = 1
    return np.packbits(bits, bitorder="little")


def find_bits(buffer: Array, num_bits: int) -> Array:
    return np.flatnonzero(bits_of(buffer, num_bits))


def elias_fano(index: Array, low: int, num_bits: int) -> tuple[Array, Array]:
    index = index.astype(np.int64)
    return pack_bits(index & ((1 << low) - 1), low), set_bits((index >> low) + np.arange(index.size), num_bits)


def from_elias_fano(lows: Array, highs: Array, low: int, num_bits: int) -> Array:
    positions = find_bits(highs, num_bits)
    return ((positions - np.arange(positions.size)) << low) + unpack_bits(lows, low, positions.size)


def bits_of(buffer: Array, count: int) -> Array:
    """Return the first ``count`` bits of a buffer, lowest bit first [count] uint8; zeros follow the buffer's end."""
    if not buffer.size:  # np.unpackbits returns uninitialized memory for an empty buffer
        return np.zeros(count, np.uint8)
    return np.unpackbits(buffer, count=count, bitorder="little")
