"""Kernels of ``numba/matrices.py``: products of the tensor, as a matrix, with a matrix of few rows, and outer products.

Arrays have two dimensions here. Each inner loop over columns processes several rows at once, so that their partial sums
stay in registers.
"""

# mypy: disable-error-code="assignment"
# (Numba gives a variable the widest of its types; mypy gives it the type of the first assignment.)

from __future__ import annotations

import numpy as np

from hvdcompress.ops.numba._kernels.compiling import BLOCK, MAGNITUDE, compiled, reordered
from hvdcompress.ops.numba._kernels.statistics import added, folded
from hvdcompress.ops.shared import PIECE


@reordered
def products(a, x, out):
    """Set out = a · xᵀ, for a [r × m] and x [n × m], with up to four rows of a at a time."""
    last = a.shape[0] - 1
    for i in range(x.shape[0]):
        row = x[i]
        for k in range(0, last + 1, 4):
            second, third, fourth = min(k + 1, last), min(k + 2, last), min(k + 3, last)
            a0, a1, a2, a3 = a[k], a[second], a[third], a[fourth]
            total0, total1, total2, total3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
            for j in range(row.size):  # LLVM makes one loop for each number of sums
                total0 += row[j] * a0[j]
                if k < last:
                    total1 += row[j] * a1[j]
                if k + 1 < last:
                    total2 += row[j] * a2[j]
                if k + 2 < last:
                    total3 += row[j] * a3[j]
            out[k, i] = total0
            if k < last:
                out[second, i] = total1
            if k + 1 < last:
                out[third, i] = total2
            if k + 2 < last:
                out[fourth, i] = total3


@reordered
def accumulate_few_products(gradient, residual, scale, out, a, found, remove):
    """Accumulate, and set found = a · outᵀ, for a [4 × m]. Return the bits of the largest magnitude.

    If ``remove`` is not 0, also subtract remove · foundᵀ · a from each row of ``out`` while the row is in the cache.
    """
    a0, a1, a2, a3 = a[0], a[1], a[2], a[3]
    most = np.int32(0)
    width = a.shape[1]
    for i in range(found.shape[1]):
        row = slice(i * width, (i + 1) * width)
        g = gradient[row]
        r = residual[row]
        o = out[row]
        total0, total1, total2, total3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
        for j in range(width):
            value = np.float32(scale * g[j] + r[j])
            o[j] = value
            most = max(most, value.view(np.int32) & MAGNITUDE)
            total0 += value * a0[j]
            total1 += value * a1[j]
            total2 += value * a2[j]
            total3 += value * a3[j]
        found[0, i], found[1, i], found[2, i], found[3, i] = total0, total1, total2, total3
        total0, total1, total2, total3 = remove * total0, remove * total1, remove * total2, remove * total3
        for j in range(width if remove != 0 else 0):
            o[j] -= ((total0 * a0[j] + total1 * a1[j]) + total2 * a2[j]) + total3 * a3[j]
    return most


@reordered
def accumulate_eight_products(gradient, residual, scale, out, a, found, remove):
    """As ``accumulate_few_products``, for a [8 × m]."""
    a0, a1, a2, a3, a4, a5, a6, a7 = a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]
    most = np.int32(0)
    width = a.shape[1]
    zero = np.float32(0)
    for i in range(found.shape[1]):
        row = slice(i * width, (i + 1) * width)
        g = gradient[row]
        r = residual[row]
        o = out[row]
        t0, t1, t2, t3, t4, t5, t6, t7 = zero, zero, zero, zero, zero, zero, zero, zero
        for j in range(width):
            value = np.float32(scale * g[j] + r[j])
            o[j] = value
            most = max(most, value.view(np.int32) & MAGNITUDE)
            t0 += value * a0[j]
            t1 += value * a1[j]
            t2 += value * a2[j]
            t3 += value * a3[j]
            t4 += value * a4[j]
            t5 += value * a5[j]
            t6 += value * a6[j]
            t7 += value * a7[j]
        found[0, i], found[1, i], found[2, i], found[3, i] = t0, t1, t2, t3
        found[4, i], found[5, i], found[6, i], found[7, i] = t4, t5, t6, t7
        t0, t1, t2, t3 = remove * t0, remove * t1, remove * t2, remove * t3
        t4, t5, t6, t7 = remove * t4, remove * t5, remove * t6, remove * t7
        for j in range(width if remove != 0 else 0):
            half = (t0 * a0[j] + t1 * a1[j]) + (t2 * a2[j] + t3 * a3[j])
            o[j] -= half + ((t4 * a4[j] + t5 * a5[j]) + (t6 * a6[j] + t7 * a7[j]))
    return most


@compiled
def combinations(a, x, out):
    """Set out = a · x, for a [r × n] and x [n × m]."""
    out[:] = np.float32(0)
    for start in range(0, x.shape[1], 2 * BLOCK):
        for i in range(len(x)):
            part = x[i, start : start + 2 * BLOCK]
            for k in range(len(a)):
                o = out[k, start : start + 2 * BLOCK]
                share = a[k, i]
                for j in range(o.size):
                    o[j] += share * part[j]


@compiled
def outer_of_eight(left, right, out, factor):
    """As ``outer``, for eight rows: all products are added in registers, which takes three quarters of the time."""
    for i in range(out.shape[0]):
        a, b, c, d = left[0, i], left[1, i], left[2, i], left[3, i]
        e, f, g, h = left[4, i], left[5, i], left[6, i], left[7, i]
        r, s, t, u, v, w, x, y = right[0], right[1], right[2], right[3], right[4], right[5], right[6], right[7]
        o = out[i]
        for j in range(o.size):
            half = ((a * r[j] + b * s[j]) + c * t[j]) + d * u[j]
            o[j] = ((((half + e * v[j]) + f * w[j]) + g * x[j]) + h * y[j]) * factor


@compiled
def outer(left, right, out, factor, subtract):
    """Set out = factor · leftᵀ · right, for left [r × n] and right [r × m], or subtract that from ``out``.

    Four products at a time are added in registers. LLVM makes one loop for each number of remaining products.
    """
    if left.shape[0] == 8 and not subtract:  # the rank that suits MLPs
        outer_of_eight(left, right, out, factor)
        return
    count = left.shape[0]
    width = out.shape[1]
    first = max(count - 4, 0)
    before = np.zeros(BLOCK, np.float32)
    ones = first % 4
    second, third, fourth = min(first + 1, count - 1), min(first + 2, count - 1), min(first + 3, count - 1)
    for i in range(out.shape[0]):
        a, b, c, d = left[first, i], left[second, i], left[third, i], left[fourth, i]
        for start in range(0, width, BLOCK):
            stop = min(start + BLOCK, width)
            for k in range(ones):
                share = left[k, i]
                row = right[k, start:stop]
                for j in range(row.size):
                    before[j] = before[j] + share * row[j] if k else share * row[j]
            for k in range(ones, first, 4):
                e, f, g, h = left[k, i], left[k + 1, i], left[k + 2, i], left[k + 3, i]
                r, s = right[k, start:stop], right[k + 1, start:stop]
                t, u = right[k + 2, start:stop], right[k + 3, start:stop]
                for j in range(r.size):
                    value = before[j] + e * r[j] if k else e * r[j]
                    before[j] = ((value + f * s[j]) + g * t[j]) + h * u[j]
            x, y = right[first, start:stop], right[second, start:stop]
            z, w = right[third, start:stop], right[fourth, start:stop]
            o = out[i, start:stop]
            for j in range(o.size):
                value = a * x[j]
                if count > 4:
                    value = before[j] + value
                if count > 1:
                    value += b * y[j]
                if count > 2:
                    value += c * z[j]
                if count > 3:
                    value += d * w[j]
                o[j] = o[j] - value * factor if subtract else value * factor


@compiled
def dot(x, y):
    """Return the scalar product in float64, added in the order that the spec gives at :meth:`bucket_norms`."""
    return added(products_of_pieces(x, y))


@compiled
def products_of_pieces(x, y):
    """Return the scalar product of each piece of two vectors."""
    sums = np.zeros(-(-x.size // PIECE))
    wide = np.zeros(min(x.size, PIECE))
    for piece in range(sums.size):
        a = x[piece * PIECE : (piece + 1) * PIECE]
        b = y[piece * PIECE : (piece + 1) * PIECE]
        wide[a.size :] = 0
        for i in range(a.size):
            wide[i] = a[i] * b[i]
        sums[piece] = folded(wide)
    return sums


@compiled
def orthogonalise(rows, number, negligible):
    """Subtract the projections onto the rows before it from row ``number``, and normalise it.

    Return False, with a row of zeros, if nothing remains.
    """
    row = rows[number]
    if not to_length_1(row, 0.0):
        return False
    for _ in range(2):  # twice, for the reason given in ops/numpy.py
        for k in range(number):
            before = rows[k]  # numba knows that this row is contiguous; the rows of a slice it does not
            share = dot(before, row)
            for j in range(row.size):
                row[j] -= share * before[j]
    return to_length_1(row, negligible)


@compiled
def orthogonalise_from(rows, first, negligible):
    """Orthogonalise rows from number ``first`` on. Return the number of the first one that becomes 0, or ``len``."""
    for number in range(first, len(rows)):
        if not orthogonalise(rows, number, negligible):
            return number
    return len(rows)


@compiled
def to_length_1(row, least):
    """Divide a row by its length. If the length is not above ``least``, set the row to 0 and return False."""
    length = np.sqrt(dot(row, row))
    for j in range(row.size):
        row[j] = row[j] / length if length > least else 0.0
    return length > least


@compiled
def hadamard(x, scale, block, out):
    """Set out = H·x for each block. The first three passes are one, in registers; then two passes at a time are one."""
    for start in range(0, x.size, block):
        y = out[start : start + block]
        for i in range(block):
            y[i] = x[start + i] * scale
        apart = 1
        if block >= 8:
            for i in range(0, block, 8):
                a, b, c, d, e, f, g, h = y[i], y[i + 1], y[i + 2], y[i + 3], y[i + 4], y[i + 5], y[i + 6], y[i + 7]
                a, b, c, d, e, f, g, h = a + b, a - b, c + d, c - d, e + f, e - f, g + h, g - h
                a, b, c, d, e, f, g, h = a + c, b + d, a - c, b - d, e + g, f + h, e - g, f - h
                y[i], y[i + 1], y[i + 2], y[i + 3] = a + e, b + f, c + g, d + h
                y[i + 4], y[i + 5], y[i + 6], y[i + 7] = a - e, b - f, c - g, d - h
            apart = 8
        while 2 * apart < block:
            for low in range(0, block, 4 * apart):
                p, q, r, s = y[low:], y[low + apart :], y[low + 2 * apart :], y[low + 3 * apart :]
                for i in range(apart):
                    a, b, c, d = p[i] + q[i], p[i] - q[i], r[i] + s[i], r[i] - s[i]
                    p[i], q[i], r[i], s[i] = a + c, b + d, a - c, b - d
            apart *= 4
        while apart < block:
            for low in range(0, block, 2 * apart):
                p, q = y[low:], y[low + apart :]
                for i in range(apart):
                    a, b = p[i], q[i]
                    p[i], q[i] = a + b, a - b
            apart *= 2
