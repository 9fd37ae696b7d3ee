"""The kernels of ``triton/matrices.py``."""

import triton
import triton.language as tl

from hvdcompress.ops.shared import NEGLIGIBLE
from hvdcompress.ops.triton._kernels.codes import drawn

LEAST = tl.constexpr(NEGLIGIBLE)


@triton.jit
def at_length_1(row, least):
    """Divide a row by its length; zeros where that is not above ``least``."""
    length = tl.sqrt(tl.sum(row * row, 0))
    return tl.where(length > least, row / tl.where(length > least, length, 1.0), 0.0)


@triton.jit
def remainder(row, done, number, m, at, inside):
    """What the first ``number`` orthonormal rows of ``done`` leave of a row, at length 1, or zeros."""
    row = at_length_1(row, 0.0)
    for _ in tl.static_range(2):
        total = tl.zeros_like(row)
        for other in range(number):
            direction = tl.load(done + other * m + at, inside, 0.0)
            total += tl.sum(direction * row, 0) * direction
        row -= total
    return at_length_1(row, LEAST)


@triton.jit(do_not_specialize=["key", "rows", "m"])
def orthonormalise(x, done, out, key, rows, m, SPARE: tl.constexpr, WIDTH: tl.constexpr):
    """One program for all rows. Each thread reads of ``done`` what it has written itself: all have one layout.

    Args:
        x: [rows, m].
        done: float64 [rows, m], written.
        out: the same in float32, written.
        key: of the random rows that replace those that are zeros.
        rows: how many.
        m: elements of a row.
        SPARE: whether to replace rows that are zeros.
        WIDTH: a power of two, m or more.
    """
    at = tl.arange(0, WIDTH)
    inside = at < m
    for number in range(rows):
        left = remainder(tl.load(x + number * m + at, inside, 0.0).to(tl.float64), done, number, m, at, inside)
        if SPARE:
            other = tl.where(inside, (drawn(number * m + at, key) - 0.5).to(tl.float64), 0.0)
            other = remainder(other, done, number, m, at, inside)
            left = tl.where(tl.max(tl.abs(left), 0) > 0, left, other)
        tl.store(done + number * m + at, left, inside)
        tl.store(out + number * m + at, left.to(tl.float32), inside)
