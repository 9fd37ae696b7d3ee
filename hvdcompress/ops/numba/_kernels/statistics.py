"""Kernels of ``numba/statistics.py``. Vectors are float32, or their ``bits`` viewed as int32."""

# mypy: disable-error-code="assignment"
# (Numba gives a variable the widest of its types; mypy gives it the type of the first assignment.)

from __future__ import annotations

import numpy as np

from hvdcompress.ops.numba._kernels.compiling import FOUR, LANES, MAGNITUDE, compiled
from hvdcompress.ops.shared import PIECE


@compiled
def add_moments(x, total, squares):
    """Add x and x², at most FOUR elements, to LANES partial sums of each."""
    if x.size == FOUR:  # each partial sum is loaded once for four elements
        a, b, c, d = x[:LANES], x[LANES : 2 * LANES], x[2 * LANES : 3 * LANES], x[3 * LANES :]
        for i in range(LANES):
            one, two, three, four = np.float64(a[i]), np.float64(b[i]), np.float64(c[i]), np.float64(d[i])
            total[i] = (((total[i] + one) + two) + three) + four
            squares[i] = (((squares[i] + one * one) + two * two) + three * three) + four * four
    else:
        for i in range(x.size):
            wide = np.float64(x[i])
            total[i % LANES] += wide
            squares[i % LANES] += wide * wide


@compiled
def moments(x, total, squares):
    for start in range(0, x.size, FOUR):
        add_moments(x[start : start + FOUR], total, squares)


@compiled
def largest(bits):
    most = np.int32(0)
    for i in range(bits.size):
        most = max(most, bits[i] & MAGNITUDE)
    return most


@compiled
def bucket_max(bits, bucket, out):
    for j in range(out.size):
        part = bits[j * bucket : (j + 1) * bucket]
        most = np.int32(0)
        for i in range(part.size):
            most = max(most, part[i] & MAGNITUDE)
        out[j] = most


@compiled
def fold(wide):
    """Return the sum of PIECE numbers, folded in half until one is left; overwrites them."""
    for i in range(128):
        wide[i] = (wide[i] + wide[i + 256]) + (wide[i + 128] + wide[i + 384])
    for i in range(64):
        wide[i] += wide[i + 64]
    for i in range(32):
        wide[i] += wide[i + 32]
    for i in range(16):
        wide[i] += wide[i + 16]
    for i in range(8):
        wide[i] += wide[i + 8]
    return ((wide[0] + wide[4]) + (wide[2] + wide[6])) + ((wide[1] + wide[5]) + (wide[3] + wide[7]))


@compiled
def folded(values):
    """Return the sum of any number of numbers, folded in half until one is left; overwrites them."""
    width = values.size
    while width > 1:
        half = (width + 1) // 2
        low, high = values[:half], values[half:width]
        for i in range(high.size):
            low[i] += high[i]
        width = half
    return values[0]


@compiled
def added(values):
    """Return the sum of numbers, added in the order that the spec gives at :meth:`bucket_norms`; overwrites them."""
    while values.size > PIECE:
        sums = np.zeros(-(-values.size // PIECE))
        wide = np.zeros(PIECE)
        for piece in range(sums.size):
            part = values[piece * PIECE : (piece + 1) * PIECE]
            for i in range(part.size):  # an assignment to a slice would compile its error message: one to four seconds
                wide[i] = part[i]
            wide[part.size :] = 0
            sums[piece] = fold(wide)
        values = sums
    return folded(values)


@compiled
def add_rows(rows, out):
    """Write the sum of each row of ``rows`` [m, width] to ``out`` [m]; overwrites ``rows``."""
    for row in range(out.size):
        out[row] = added(rows[row])


@compiled
def piece_sums(x, bucket, squares, out):
    """Write the sums of x² or of |x| over each piece of each bucket to ``out`` [buckets, pieces]."""
    wide = np.zeros(min(bucket, PIECE))
    for row in range(out.shape[0]):
        for piece in range(out.shape[1]):
            start = row * bucket + piece * wide.size
            part = x[start : min(start + wide.size, (row + 1) * bucket)]
            if part.size < wide.size:
                wide[:] = 0
            for i in range(part.size):
                value = np.float64(part[i])
                wide[i] = value * value if squares else abs(value)
            out[row, piece] = fold(wide) if wide.size == PIECE else folded(wide)
