"""The loops of ``numba/matrices.py``: matrices of two dimensions, few of whose rows multiply the tensor.

Each loop over the tensor's columns takes several of its rows, or of those of the factor, while they are in registers.
"""

# mypy: disable-error-code="assignment"
# (In a kernel a variable takes the widest of its types; Python's rule is the first.)

from __future__ import annotations

import numpy as np

from hvdcompress.ops.numba._kernels.compiling import BLOCK, MAGNITUDE, compiled, reordered
from hvdcompress.ops.numba._kernels.statistics import added, folded
from hvdcompress.ops.shared import PIECE


@reordered
def products(a, x, out):
    """Write a · xᵀ to ``out``, for a [r × m], x [n × m]; four rows of a at a time, as far as there are."""
    last = a.shape[0] - 1
    for i in range(x.shape[0]):
        row = x[i]
        for k in range(0, last + 1, 4):
            second, third, fourth = min(k + 1, last), min(k + 2, last), min(k + 3, last)
            a0, a1, a2, a3 = a[k], a[second], a[third], a[fourth]
            total0, total1, total2, total3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
            for j in range(row.size):  # LLVM makes a loop of its own of each number of sums
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
    """Accumulate, and write a · outᵀ to ``found``, for a [4 × m]; returns the greatest magnitude's bits.

    Unless it is 0, remove · foundᵀ · a is subtracted from each row while the cache has it.
    """
    a0, a1, a2, a3 = a[0], a[1], a[2], a[3]
    most, width = np.int32(0), a.shape[1]
    for i in range(found.shape[1]):
        row = slice(i * width, (i + 1) * width)
        g, r, o = gradient[row], residual[row], out[row]
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
    most, width, zero = np.int32(0), a.shape[1], np.float32(0)
    for i in range(found.shape[1]):
        row = slice(i * width, (i + 1) * width)
        g, r, o = gradient[row], residual[row], out[row]
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
    """Write a · x to ``out``, for a [r × n], x [n × m]."""
    rows, width = x.shape
    eights = rows // 8 * 8
    out[:] = np.float32(0)
    for start in range(0, width, 2 * BLOCK):
        stop = min(start + 2 * BLOCK, width)
        for i in range(0, eights, 8):
            x0, x1, x2, x3 = x[i, start:stop], x[i + 1, start:stop], x[i + 2, start:stop], x[i + 3, start:stop]
            x4, x5, x6, x7 = x[i + 4, start:stop], x[i + 5, start:stop], x[i + 6, start:stop], x[i + 7, start:stop]
            for k in range(a.shape[0]):
                o, s = out[k, start:stop], a[k, i : i + 8]
                s0, s1, s2, s3, s4, s5, s6, s7 = s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7]
                for j in range(o.size):
                    left = (s0 * x0[j] + s1 * x1[j]) + (s2 * x2[j] + s3 * x3[j])
                    o[j] += left + ((s4 * x4[j] + s5 * x5[j]) + (s6 * x6[j] + s7 * x7[j]))
        for i in range(eights, rows):
            part = x[i, start:stop]
            for k in range(a.shape[0]):
                o, share = out[k, start:stop], a[k, i]
                for j in range(o.size):
                    o[j] += share * part[j]


@compiled
def outer_of_eight(left, right, out, factor):
    """As ``outer``, of eight rows: all products are added in registers, in three quarters of the time."""
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
    """Write factor · leftᵀ · right, for left [r × n], right [r × m], to ``out``, or subtract it from what is there.

    Four products at a time are added in registers; LLVM makes a loop of its own of each number of the last ones.
    """
    if left.shape[0] == 8 and not subtract:  # rank 4, with the momentum to take back
        outer_of_eight(left, right, out, factor)
        return
    count, width = left.shape[0], out.shape[1]
    first, before = max(count - 4, 0), np.zeros(BLOCK, np.float32)
    ones = first % 4
    second, third, fourth = min(first + 1, count - 1), min(first + 2, count - 1), min(first + 3, count - 1)
    for i in range(out.shape[0]):
        a, b, c, d = left[first, i], left[second, i], left[third, i], left[fourth, i]
        for start in range(0, width, BLOCK):
            stop = min(start + BLOCK, width)
            for k in range(ones):
                share, row = left[k, i], right[k, start:stop]
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
    """A scalar product in float64, added in the order of the spec's :meth:`bucket_norms`."""
    return added(products_of_pieces(x, y))


@compiled
def products_of_pieces(x, y):
    """The scalar products of the pieces of two vectors."""
    sums, wide = np.zeros(-(-x.size // PIECE)), np.zeros(min(x.size, PIECE))
    for piece in range(sums.size):
        a, b = x[piece * PIECE : (piece + 1) * PIECE], y[piece * PIECE : (piece + 1) * PIECE]
        wide[a.size :] = 0
        for i in range(a.size):
            wide[i] = a[i] * b[i]
        sums[piece] = folded(wide)
    return sums


@compiled
def orthogonalise(rows, number, negligible):
    """Replace a row by what those before it leave of it, at length 1; returns False if that is nothing."""
    row = rows[number]
    if not to_length_1(row, 0.0):
        return False
    for _ in range(2):  # the reference says why twice
        for k in range(number):
            before = rows[k]  # contiguous, which the rows of a slice are not to the compiler
            share = dot(before, row)
            for j in range(row.size):
                row[j] -= share * before[j]
    return to_length_1(row, negligible)


@compiled
def coordinates(x, basis, spanned):
    """Return the products of rows of x and of the basis, and whether these combine to x, up to ``spanned``."""
    weights, most, rest = np.empty((x.shape[0], basis.shape[0])), 0.0, 0.0
    for i in range(x.shape[0]):
        row, total = x[i], np.zeros(x.shape[1])
        for k in range(basis.shape[0]):
            other = basis[k]
            share = weights[i, k] = dot(row, other)
            for j in range(row.size):
                total[j] += share * other[j]
        for j in range(row.size):
            most, rest = max(most, abs(row[j])), max(rest, abs(row[j] - total[j]))
    return weights, rest <= spanned * most


@compiled
def to_length_1(row, least):
    """Divide a row by its length; without a length above ``least`` it becomes 0, which returns False."""
    length = np.sqrt(dot(row, row))
    for j in range(row.size):
        row[j] = row[j] / length if length > least else 0.0
    return length > least
