"""Kernels of ``triton/arithmetic.py``."""

import triton
import triton.language as tl

from hvdcompress.ops.triton._kernels.floats import clipped
from hvdcompress.ops.triton._kernels.parts import add, indices, note_not_finite
from hvdcompress.ops.triton._kernels.selection import offsets_of_largest


@triton.jit
def accumulate(gradient, residual, scale, out, finite, n, BLOCK: tl.constexpr):
    at = indices(BLOCK)
    note_not_finite(add(gradient, residual, scale, out, at, at < n), finite)


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
    row = indices(ROWS)
    column = tl.arange(0, WIDTH)
    at = row[:, None] * chunk + column[None, :]
    inside = (column < chunk)[None, :] & (at < n)
    x = add(gradient, residual, scale, out, at, inside)
    note_not_finite(x, finite)
    tl.store(offset + row, offsets_of_largest(x, inside, column, WIDTH), row < chunks)


@triton.jit
def accumulate_count(gradient, residual, scale, out, finite, threshold, counts, n, BLOCK: tl.constexpr):
    at = indices(BLOCK)
    inside = at < n
    x = add(gradient, residual, scale, out, at, inside)
    note_not_finite(x, finite)
    tl.store(counts + tl.program_id(0), tl.sum((inside & (tl.abs(x) > threshold)).to(tl.int32), 0))


@triton.jit
def keep_if(x, other, finite, n, ZERO: tl.constexpr, BLOCK: tl.constexpr):
    if tl.load(finite) == 0:  # rare; otherwise a program reads only the flag
        at = indices(BLOCK)
        if ZERO:
            tl.store(x + at, 0.0, at < n)
        else:
            tl.store(x + at, tl.load(other + at, at < n), at < n)


@triton.jit
def add_sparse(x, index, values, n, m, BLOCK: tl.constexpr):
    at = indices(BLOCK)
    target = tl.load(index + at, at < m, -1).to(tl.int64)
    inside = (target >= 0) & (target < n)
    before = tl.load(x + target, inside, 0.0)
    after = before + tl.load(values + at, inside, 0.0)
    # a duplicate has the value 0 and must not overwrite the element that another entry has changed
    changed = before.to(tl.int32, bitcast=True) != after.to(tl.int32, bitcast=True)
    tl.store(x + target, after, inside & changed)


@triton.jit
def write_half(out, half, scale, factor, n, BLOCK: tl.constexpr):
    at = indices(BLOCK)
    tl.store(out + at, clipped(tl.load(half + at, at < n).to(tl.float32), 65504.0) * scale * factor, at < n)


@triton.jit
def add_runs(out, index, order, values, n, m, BLOCK: tl.constexpr):
    """Add the values of each run of equal indices to ``out``, in their order.

    The program that has the first index of a run adds the whole run.

    Args:
        out: [n].
        index: [m] ascending; indices outside of [0, n) are ignored.
        order: [m], the index in ``values`` of each entry.
        values: [m], not sorted.
        n: Number of elements of ``out``.
        m: Number of entries.
        BLOCK: Number of entries per program.
    """
    at = indices(BLOCK)
    target = tl.load(index + at, at < m, -1).to(tl.int64)
    before = tl.load(index + at - 1, (at > 0) & (at < m), -1).to(tl.int64)
    first = (target >= 0) & (target < n) & (target != before)
    total = tl.load(out + target, first, 0.0)
    active = first
    while tl.max(active.to(tl.int32), 0) > 0:  # one iteration per entry of the longest run: at most one per rank
        value = tl.load(values + tl.load(order + at, active, 0), active, 0.0)
        total = tl.where(active, total + value, total)
        at += 1
        active = active & (at < m)
        active = active & (tl.load(index + at, active, -1).to(tl.int64) == target)
    tl.store(out + target, total, first)
