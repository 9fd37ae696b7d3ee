"""The loops of ``numba/bits.py``. Arguments: numbers and positions as int64; payloads as uint8."""

# mypy: disable-error-code="assignment"
# (In a kernel a variable takes the widest of its types; Python's rule is the first.)

from __future__ import annotations

import numpy as np

from hvdcompress.ops.numba._kernels import flags
from hvdcompress.ops.numba._kernels.compiling import compiled


@compiled
def pack_bits(values, width, out):
    mask = (np.uint64(1) << np.uint64(width)) - np.uint64(1)
    held, have, at = np.uint64(0), 0, 0
    for i in range(values.size):
        held |= (np.uint64(values[i]) & mask) << np.uint64(have)
        have += width
        while have >= 8:
            out[at] = held & np.uint64(0xFF)
            held >>= np.uint64(8)
            have -= 8
            at += 1
    if have:
        out[at] = held


@compiled
def number_at(words, place, width):
    """The ``width`` bits from bit ``place`` on, at most 32; ``words`` is uint32 and one longer than needed."""
    at = np.uint64(place) >> np.uint64(5)
    pair = np.uint64(words[at]) | np.uint64(words[at + np.uint64(1)]) << np.uint64(32)
    return np.int64(pair >> (np.uint64(place) & np.uint64(31)) & ((np.uint64(1) << np.uint64(width)) - np.uint64(1)))


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
    """How many of the first bits are set."""
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
    """Bytes ``at`` to ``at`` + 8 as one number, the first one lowest; zeros follow the end."""
    bits = np.uint64(0)
    if at + 8 <= buffer.size:
        for i in range(8):
            bits |= np.uint64(buffer[at + i]) << np.uint64(8 * i)
    else:
        for i in range(buffer.size - at):
            bits |= np.uint64(buffer[at + i]) << np.uint64(8 * i)
    return bits


@compiled
def find_bits(buffer, out):
    """Where bits are set, until ``out`` is full."""
    found = 0
    for at in range(0, buffer.size, 8):
        bits = word_of(buffer, at)
        while bits and found < out.size:
            out[found] = 8 * at + flags.lowest(bits)
            found += 1
            bits &= bits - np.uint64(1)


@compiled
def elias_fano(index, low, num_bits, lows, highs):
    """``index``: int32 or int64."""
    mask = (np.uint64(1) << np.uint64(low)) - np.uint64(1)
    held, have, at = np.uint64(0), 0, 0
    for j in range(index.size):
        whole = np.int64(index[j])
        held |= (np.uint64(whole) & mask) << np.uint64(have)
        have += low
        while have >= 8:
            lows[at] = held & np.uint64(0xFF)
            held >>= np.uint64(8)
            have -= 8
            at += 1
        i = (whole >> low) + j
        if i < 0 or i >= num_bits:
            raise IndexError("a bit is outside of the bitmap")
        highs[i >> 3] |= 1 << (i & 7)
    if have:
        lows[at] = held


@compiled
def from_elias_fano(words, highs, low, out):
    """``words``: the low bits, as of ``number_at``; ``out``: as many as bits of ``highs`` are set, or fewer."""
    found = 0
    for at in range(0, highs.size, 8):
        bits = word_of(highs, at)
        while bits and found < out.size:
            place = 8 * at + flags.lowest(bits)
            out[found] = (place - found) << low | number_at(words, found * low, low)
            found += 1
            bits &= bits - np.uint64(1)
