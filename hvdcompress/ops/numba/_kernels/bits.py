"""Kernels of ``numba/bits.py``. Integers and positions are int64, payloads uint8.

Two kernels write bits through an accumulator: ``pending`` holds ``num_pending`` bits that are not written yet.
"""

# mypy: disable-error-code="assignment"
# (Numba gives a variable the widest of its types; mypy gives it the type of the first assignment.)

from __future__ import annotations

import numpy as np

from hvdcompress.ops.numba._kernels import flags
from hvdcompress.ops.numba._kernels.compiling import compiled


@compiled
def pack_bits(values, width, out):
    mask = (np.uint64(1) << np.uint64(width)) - np.uint64(1)
    pending = np.uint64(0)
    num_pending = 0
    at = 0
    for i in range(values.size):
        pending |= (np.uint64(values[i]) & mask) << np.uint64(num_pending)
        num_pending += width
        while num_pending >= 8:
            out[at] = pending & np.uint64(0xFF)
            pending >>= np.uint64(8)
            num_pending -= 8
            at += 1
    if num_pending:
        out[at] = pending


@compiled
def number_at(words, position, width):
    """Return the ``width`` bits (at most 32) from bit ``position`` on; ``words`` is uint32 with one more word."""
    at = np.uint64(position) >> np.uint64(5)
    pair = np.uint64(words[at]) | np.uint64(words[at + np.uint64(1)]) << np.uint64(32)
    mask = (np.uint64(1) << np.uint64(width)) - np.uint64(1)
    return np.int64(pair >> (np.uint64(position) & np.uint64(31)) & mask)


@compiled
def unpack_bits(words, width, out):
    for i in range(out.size):
        out[i] = number_at(words, i * width, width)


@compiled
def set_bits(positions, num_bits, out):
    for j in range(positions.size):
        i = positions[j]
        if i < 0 or i >= num_bits:
            raise IndexError("a bit is outside of the bitmap")
        out[i >> 3] |= 1 << (i & 7)


@compiled
def count_bits(buffer, num_bits):
    """Return how many of the first ``num_bits`` bits are set."""
    count = 0
    for at in range(min(buffer.size, num_bits >> 3)):
        byte = np.uint32(buffer[at])
        byte = byte - (byte >> np.uint32(1) & np.uint32(0x55))
        byte = (byte & np.uint32(0x33)) + (byte >> np.uint32(2) & np.uint32(0x33))
        count += (byte + (byte >> np.uint32(4))) & np.uint32(0xF)
    if num_bits >> 3 < buffer.size:
        for bit in range(num_bits & 7):
            count += buffer[num_bits >> 3] >> bit & 1
    return count


@compiled
def word_of(buffer, at):
    """Return bytes ``at`` to at + 8 as a uint64, the first byte lowest; zeros follow the end of the buffer."""
    bits = np.uint64(0)
    if at + 8 <= buffer.size:
        for i in range(8):
            bits |= np.uint64(buffer[at + i]) << np.uint64(8 * i)
    else:
        for i in range(buffer.size - at):
            bits |= np.uint64(buffer[at + i]) << np.uint64(8 * i)
    return bits


@compiled
def elias_fano(index, low, num_bits, lows, highs):
    """Write the low bits of ``index`` (int32 or int64) to ``lows``, and set the bits of the high parts in ``highs``."""
    mask = (np.uint64(1) << np.uint64(low)) - np.uint64(1)
    pending = np.uint64(0)
    num_pending = 0
    at = 0
    for j in range(index.size):
        whole = np.int64(index[j])
        pending |= (np.uint64(whole) & mask) << np.uint64(num_pending)
        num_pending += low
        while num_pending >= 8:
            lows[at] = pending & np.uint64(0xFF)
            pending >>= np.uint64(8)
            num_pending -= 8
            at += 1
        i = (whole >> low) + j
        if i < 0 or i >= num_bits:
            raise IndexError("a bit is outside of the bitmap")
        highs[i >> 3] |= 1 << (i & 7)
    if num_pending:
        lows[at] = pending


@compiled
def from_elias_fano(words, highs, low, out):
    """Write the decoded indices to ``out`` until it is full; ``words`` are the low bits, as for ``number_at``."""
    found = 0
    for at in range(0, highs.size, 8):
        bits = word_of(highs, at)
        while bits and found < out.size:
            position = 8 * at + flags.lowest(bits)
            out[found] = (position - found) << low | number_at(words, found * low, low)
            found += 1
            bits &= bits - np.uint64(1)
