"""The loops of ``numba/arithmetic.py``. Arguments: float32 vectors; indices as int64."""

# mypy: disable-error-code="assignment"
# (In a kernel a variable takes the widest of its types; Python's rule is the first.)

from __future__ import annotations

import numpy as np

from hvdcompress.ops.numba._kernels.compiling import BLOCK, LANES, MAGNITUDE, compiled


@compiled
def accumulate(gradient, residual, scale, out, bits, clear):
    """Returns the greatest magnitude's bits."""
    most = np.int32(0)
    for start in range(0, out.size, BLOCK):
        g, r, o = gradient[start : start + BLOCK], residual[start : start + BLOCK], out[start : start + BLOCK]
        b = bits[start : start + BLOCK]
        for i in range(o.size):
            o[i] = scale * g[i] + r[i]
        for i in range(o.size):
            most = max(most, b[i] & MAGNITUDE)
        if clear:
            g[:] = np.float32(0)
    return most


@compiled
def accumulate_moments(gradient, residual, scale, out, total, squares, clear):
    for start in range(0, out.size, LANES):
        g, r, o = gradient[start : start + LANES], residual[start : start + LANES], out[start : start + LANES]
        for i in range(o.size):
            value = scale * g[i] + r[i]
            o[i] = value
            wide = np.float64(value)
            total[i] += wide
            squares[i] += wide * wide
        if clear:
            g[:] = np.float32(0)


@compiled
def accumulate_argmax(gradient, residual, scale, out, bits, chunk, offset, clear):
    """Returns the greatest magnitude's bits."""
    greatest = np.int32(0)
    for j in range(offset.size):
        start, stop = j * chunk, min((j + 1) * chunk, out.size)
        g, r, o, b = gradient[start:stop], residual[start:stop], out[start:stop], bits[start:stop]
        for i in range(o.size):
            o[i] = scale * g[i] + r[i]
        most = np.int32(0)
        for i in range(b.size):
            most = max(most, b[i] & MAGNITUDE)
        for i in range(b.size):  # a search beside a maximum of 32 bits is faster than a maximum of value and place
            if (b[i] & MAGNITUDE) == most:
                offset[j] = i
                break
        greatest = max(greatest, most)
        if clear:
            g[:] = np.float32(0)
    return greatest


@compiled
def first_byte(word):
    """The place, 0 to 7, of the lowest byte of a uint64 that is 1 where all others are 0 or 1."""
    lowest, place = word & (~word + np.uint64(1)), np.uint64(0)
    if lowest > np.uint64(0xFFFFFFFF):
        place += np.uint64(4)
        lowest >>= np.uint64(32)
    if lowest > np.uint64(0xFFFF):
        place += np.uint64(2)
        lowest >>= np.uint64(16)
    return place + np.uint64(lowest > np.uint64(0xFF))


@compiled
def accumulate_above(gradient, residual, scale, out, bits, low, index, values, clear):
    """Returns how many magnitudes above ``low`` were noted, as far as ``index`` goes, and the greatest's bits."""
    found, room, most = 0, index.size - 1, np.int32(0)  # the last place is for what is one too many
    flag = np.zeros(BLOCK, np.int8)
    eight = flag.view(np.uint64)  # most groups of eight hold none, most others one
    for start in range(0, out.size, BLOCK):
        g, r, o = gradient[start : start + BLOCK], residual[start : start + BLOCK], out[start : start + BLOCK]
        b = bits[start : start + BLOCK]
        for i in range(o.size):
            o[i] = scale * g[i] + r[i]
        here = np.int32(0)
        for i in range(o.size):
            here = max(here, b[i] & MAGNITUDE)
        most = max(most, here)
        if clear:
            g[:] = np.float32(0)
        if here <= low or found == room:
            continue
        if o.size < BLOCK:
            flag[:] = 0
        for i in range(o.size):
            flag[i] = np.int8((b[i] & MAGNITUDE) > low)
        for group in range(eight.size):
            left = eight[group]
            while left:
                i = np.uint64(8 * group) + first_byte(left)
                index[found] = start + i
                values[found] = o[i]
                found = min(found + 1, room)
                left &= left - np.uint64(1)
    return found, most


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
def scaled(x, factor, limit, out):
    for i in range(x.size):
        value = x[i] * factor
        value = limit if value > limit else value
        out[i] = -limit if value < -limit else value
