"""The loops behind ``numba.py``, compiled at first use and kept on disk for later runs.

Memory traffic is what verbs cost, so each kernel reads its input once and makes no temporary of the tensor's
size. Three habits make LLVM vectorise them: loops run over *slices* (numba then knows that no index is negative),
magnitudes are compared as integers (the bits of non-negative floats ascend with the floats), and
floating-point sums run in lanes, never reordered (no ``fastmath``), so results are the same on every processor.

Arguments: float32 vectors, their ``bits`` as int32 (uint32 where they are shifted about), indices as int64.
"""

# mypy: disable-error-code="assignment"
# (In a kernel a variable takes the widest of its types; Python's rule is the first.)

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from hvdcompress.ops.numpy import FP16_MAX

MAGNITUDE = np.int32(0x7FFFFFFF)  # all bits of a float32 but its sign
LANES = 256  # sums that run side by side
BLOCK = 1024  # elements that stay in the processor's nearest cache


def compiled(function: Any) -> Any:
    """``function``, compiled when first called; the result is kept on disk, for all ranks and later runs."""
    try:
        return njit(function, cache=True, nogil=True)
    except RuntimeError:  # neither beside this file nor in the user's cache can anything be written
        return njit(function, nogil=True)


@compiled
def accumulate(gradient, residual, scale, out):
    for i in range(out.size):
        out[i] = scale * gradient[i] + residual[i]


@compiled
def accumulate_moments(gradient, residual, scale, out, total, squares):
    for start in range(0, out.size, LANES):
        g, r, o = gradient[start : start + LANES], residual[start : start + LANES], out[start : start + LANES]
        for i in range(o.size):
            value = scale * g[i] + r[i]
            o[i] = value
            wide = np.float64(value)
            total[i] += wide
            squares[i] += wide * wide


@compiled
def moments(x, total, squares):
    for start in range(0, x.size, LANES):
        part = x[start : start + LANES]
        for i in range(part.size):
            wide = np.float64(part[i])
            total[i] += wide
            squares[i] += wide * wide


@compiled
def blend(x, residual, beta, rest):
    for i in range(x.size):
        x[i] = beta * x[i] + rest * residual[i]


@compiled
def subtract(x, own, factor):
    for i in range(x.size):
        x[i] -= factor * own[i]


@compiled
def add_at(out, index, values, factor):
    for j in range(index.size):
        i = index[j]
        if i < 0 or i >= out.size:  # never write out of bounds, whatever came over the wire
            raise IndexError("an index is outside of the tensor")
        out[i] += factor * values[j]


@compiled
def largest(bits):
    most = np.int32(0)
    for i in range(bits.size):
        most = max(most, bits[i] & MAGNITUDE)
    return most


@compiled
def count(bits, low):
    total = 0
    for start in range(0, bits.size, BLOCK):
        part = bits[start : start + BLOCK]
        count = np.int32(0)  # narrow: as many lanes as the comparison
        for i in range(part.size):
            count += np.int32(1) if (part[i] & MAGNITUDE) >= low else np.int32(0)
        total += count
    return total


@compiled
def find(bits, low, span, out):
    """Indices with low ≤ |bits| ≤ low + span, until ``out`` is full; returns how many."""
    found = 0
    flag = np.zeros(BLOCK, np.uint8)
    eight = flag.view(np.uint64)  # most groups of eight hold none
    for start in range(0, bits.size, BLOCK):
        part = bits[start : start + BLOCK]
        if part.size < BLOCK:
            flag[:] = 0
        for i in range(part.size):
            flag[i] = np.uint32((part[i] & MAGNITUDE) - low) <= span
        for group in range(eight.size):
            if eight[group]:
                for i in range(8 * group, 8 * group + 8):
                    if flag[i]:
                        if found == out.size:
                            return found
                        out[found] = start + i
                        found += 1
    return found


@compiled
def histogram(bits, stride):
    """How many of every stride-th |x| share sign-less exponent and first 3 bits of the mantissa [2048]."""
    count = np.zeros(2048, np.int64)
    for i in range(0, bits.size, stride):
        count[(bits[i] & MAGNITUDE) >> 20] += 1
    return count


@compiled
def chunk_argmax(bits, chunk, out):
    for j in range(out.size):
        part = bits[j * chunk : (j + 1) * chunk]
        best = np.int64(-1)
        for i in range(part.size):  # one number for magnitude and place: a plain maximum, lowest place first
            best = max(best, np.int64(part[i] & MAGNITUDE) << 32 | (0x7FFFFFFF - i))
        out[j] = 0x7FFFFFFF - (best & 0x7FFFFFFF)


@compiled
def chunk_positions(offset, chunk, last, out):
    for j in range(out.size):
        out[j] = min(j * chunk + offset[j], last)


@compiled
def to_fp16(x, scale, limit, out):
    saturated = 0
    scaled, raised = np.zeros(BLOCK, np.float32), np.zeros(BLOCK, np.float32)
    bits, raised_bits = scaled.view(np.uint32), raised.view(np.uint32)
    for start in range(0, x.size, BLOCK):
        part, half = x[start : start + BLOCK], out[start : start + BLOCK]
        count = np.int32(0)
        for i in range(part.size):
            value = part[i] * scale
            count += np.int32(1) if abs(value) > limit else np.int32(0)
            scaled[i] = min(max(value, -limit), limit)
            raised[i] = abs(scaled[i]) + np.float32(0.5)
        saturated += count
        for i in range(part.size):
            b = bits[i] & np.uint32(0x7FFFFFFF)
            # move the exponent by 112 (0x38 << 24), round the 13 dropped bits to nearest even (+ 0xFFF)
            normal = (b - np.uint32(0x37FFF001) + (b >> np.uint32(13) & np.uint32(1))) >> np.uint32(13)
            # below 2^-14 halves are multiples of 2^-24, to which adding 0.5 has rounded
            tiny = raised_bits[i] - np.uint32(0x3F000000)
            sign = bits[i] >> np.uint32(16) & np.uint32(0x8000)
            half[i] = sign | (tiny if b < np.uint32(0x38800000) else normal)
    return saturated


@compiled
def from_fp16(half, scale, out, out_bits):
    for start in range(0, half.size, BLOCK):
        h, o, bits = half[start : start + BLOCK], out[start : start + BLOCK], out_bits[start : start + BLOCK]
        for i in range(h.size):
            bits[i] = (np.uint32(h[i] & np.uint16(0x7FFF)) << np.uint32(13)) + np.uint32(0x38000000)
        for i in range(h.size):
            m = np.int32(h[i] & np.uint16(0x7FFF))
            value = np.float32(m) * np.float32(2.0**-24) if m < 0x400 else min(o[i], np.float32(FP16_MAX))
            value = np.float32(np.nan) if m > 0x7C00 else value
            o[i] = (-value if h[i] >= np.uint16(0x8000) else value) * scale


@compiled
def to_bf16(bits, out):
    for i in range(bits.size):
        b = bits[i]
        rounded = (b + np.uint32(0x7FFF) + (b >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
        largest = b >> np.uint32(16) & np.uint32(0x8000) | np.uint32(0x7F7F)
        out[i] = largest if (rounded & np.uint32(0x7FFF)) >= np.uint32(0x7F80) else rounded


@compiled
def from_bf16(bits, out):
    for i in range(bits.size):
        out[i] = np.uint32(bits[i]) << np.uint32(16)


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
def unpack_bits(buffer, width, out):
    mask = (np.uint64(1) << np.uint64(width)) - np.uint64(1)
    held, have, at = np.uint64(0), 0, 0
    for i in range(out.size):
        while have < width:
            if at < buffer.size:  # as in the reference, zeros follow the buffer's end
                held |= np.uint64(buffer[at]) << np.uint64(have)
            have += 8
            at += 1
        out[i] = held & mask
        held >>= np.uint64(width)
        have -= width


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
