"""The kernels of ``triton/arithmetic.py``."""

import triton
import triton.language as tl

from hvdcompress.ops.triton._kernels.floats import float_of_half
from hvdcompress.ops.triton._kernels.parts import add, note_not_finite, places
from hvdcompress.ops.triton._kernels.selection import is_chosen, offsets_of_largest
from hvdcompress.ops.triton._kernels.statistics import store_moments


@triton.jit
def accumulate(gradient, residual, scale, out, finite, n, BLOCK: tl.constexpr):
    at = places(BLOCK)
    note_not_finite(add(gradient, residual, scale, out, at, at < n), finite)


@triton.jit
def accumulate_moments(gradient, residual, scale, out, sums, n, BLOCK: tl.constexpr):
    at = places(BLOCK)
    store_moments(add(gradient, residual, scale, out, at, at < n), sums)


@triton.jit
def accumulate_argmax(
    gradient,
    residual,
    scale,
    out,
    finite,
    offset,
    n,
    chunk,
    chunks,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row, column = places(ROWS), tl.arange(0, WIDTH)
    at = row[:, None] * chunk + column[None, :]
    inside = (column < chunk)[None, :] & (at < n)
    x = add(gradient, residual, scale, out, at, inside)
    note_not_finite(x, finite)
    tl.store(offset + row, offsets_of_largest(x, inside, column, WIDTH), row < chunks)


@triton.jit
def accumulate_count(gradient, residual, scale, out, finite, threshold, counts, n, BLOCK: tl.constexpr):
    at = places(BLOCK)
    inside = at < n
    x = add(gradient, residual, scale, out, at, inside)
    note_not_finite(x, finite)
    tl.store(counts + tl.program_id(0), tl.sum((inside & is_chosen(x, threshold, False)).to(tl.int32), 0))


@triton.jit
def keep_if(x, other, finite, n, ZERO: tl.constexpr, BLOCK: tl.constexpr):
    if tl.load(finite) == 0:  # almost never: a program then reads nothing else
        at = places(BLOCK)
        if ZERO:
            tl.store(x + at, 0.0, at < n)
        else:
            tl.store(x + at, tl.load(other + at, at < n), at < n)


@triton.jit
def blend(x, residual, beta, rest, n, BLOCK: tl.constexpr):
    at = places(BLOCK)
    inside = at < n
    tl.store(x + at, tl.load(x + at, inside) * beta + tl.load(residual + at, inside) * rest, inside)


@triton.jit
def subtract(x, own, factor, n, BLOCK: tl.constexpr):
    at = places(BLOCK)
    inside = at < n
    tl.store(x + at, tl.load(x + at, inside) - tl.load(own + at, inside) * factor, inside)


@triton.jit
def subtract_sparse(x, index, values, factor, n, m, BLOCK: tl.constexpr):
    at = places(BLOCK)
    place = tl.load(index + at, at < m, -1).to(tl.int64)
    inside = (place >= 0) & (place < n)
    before = tl.load(x + place, inside, 0.0)
    after = before - tl.load(values + at, inside, 0.0) * factor
    # a repeat, which has the value 0, changes nothing: it must not overwrite what another one has changed
    changed = before.to(tl.int32, bitcast=True) != after.to(tl.int32, bitcast=True)
    tl.store(x + place, after, inside & changed)


@triton.jit
def zero_where(x, own, n, BLOCK: tl.constexpr):
    at = places(BLOCK)
    tl.store(x + at, 0.0, (at < n) & (tl.load(own + at, at < n, 0.0) != 0))


@triton.jit
def zero_where_sparse(x, index, values, n, m, BLOCK: tl.constexpr):
    at = places(BLOCK)
    place = tl.load(index + at, at < m, -1).to(tl.int64)
    inside = (place >= 0) & (place < n)
    tl.store(x + place, 0.0, inside & (tl.load(values + at, inside, 0.0) != 0))


@triton.jit
def write(out, total, factor, n, BLOCK: tl.constexpr):
    at = places(BLOCK)
    tl.store(out + at, tl.load(total + at, at < n) * factor, at < n)


@triton.jit
def write_half(out, half, scale, factor, n, BLOCK: tl.constexpr):
    at = places(BLOCK)
    tl.store(out + at, float_of_half(tl.load(half + at, at < n)) * scale * factor, at < n)


@triton.jit
def write_runs(out, index, order, values, factor, n, m, BLOCK: tl.constexpr):
    """Write the sum of each run of equal indices, added in their order, by the program that has its first one.

    Args:
        out: 0 everywhere.
        index: [m] ascending; those outside of [0, n) are left out.
        order: [m] where the value of each index is.
        values: as they came.
        factor: of each value, before it is added.
        n: elements of ``out``.
        m: indices.
        BLOCK: elements of a program.
    """
    at = places(BLOCK)
    place = tl.load(index + at, at < m, -1).to(tl.int64)
    before = tl.load(index + at - 1, (at > 0) & (at < m), -1).to(tl.int64)
    first = (place >= 0) & (place < n) & (place != before)
    total = tl.zeros((BLOCK,), out.dtype.element_ty)
    active = first
    while tl.max(active.to(tl.int32), 0) > 0:  # as many turns as ranks chose the same place
        value = tl.load(values + tl.load(order + at, active, 0), active, 0.0) * factor
        total = tl.where(active, total + value.to(out.dtype.element_ty), total)
        at += 1
        active = active & (at < m)
        active = active & (tl.load(index + at, active, -1).to(tl.int64) == place)
    tl.store(out + place, total, first)
