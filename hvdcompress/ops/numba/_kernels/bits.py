"""The loops of ``numba/bits.py``. Arguments: numbers and positions as int64; payloads as uint8."""

# mypy: disable-error-code="assignment"
# (In a kernel a variable takes the widest of its types; Python's rule is the first.)

from __future__ import annotations

import numpy as np

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
def find_bits(buffer, num_bits):
    count = 0
    for at in range(buffer.size):
        byte = np.uint32(buffer[at])
        byte = byte - (byte >> np.uint32(1) & np.uint32(0x55))
        byte = (byte & np.uint32(0x33)) + (byte >> np.uint32(2) & np.uint32(0x33))
        count += (byte + (byte >> np.uint32(4))) & np.uint32(0xF)
    out = np.empty(count + 1, np.int64)  # one more: each bit is written, a zero over its successor
    found = 0
    for at in range(buffer.size):
        byte = np.int64(buffer[at])
        for bit in range(8):
            out[found] = 8 * at + bit
            found += byte >> bit & 1
    while found and out[found - 1] >= num_bits:  # bits beyond the end, in the last byte
        found -= 1
    return out[:found]


@compiled
def set_highs(index, low, num_bits, out):
    for j in range(index.size):
        i = (index[j] >> low) + j
        if i < 0 or i >= num_bits:
            raise IndexError("a bit is outside of the bitmap")
        out[i >> 3] |= 1 << (i & 7)


@compiled
def add_lows(words, low, out):
    """From the places of bits in a bitmap to the indices, given their low bits."""
    for i in range(out.size):
        out[i] = (out[i] - i) << low | number_at(words, i * low, low)
