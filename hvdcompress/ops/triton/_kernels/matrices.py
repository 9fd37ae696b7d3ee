"""Kernels of ``triton/matrices.py``."""

import triton
import triton.language as tl

from hvdcompress.ops.shared import NEGLIGIBLE
from hvdcompress.ops.triton._kernels.codes import drawn

LEAST = tl.constexpr(NEGLIGIBLE)


@triton.jit
def normalised(row, least):
    """Return a row divided by its length, or zeros if the length is not above ``least``."""
    length = tl.sqrt(tl.sum(row * row, 0))
    return tl.where(length > least, row / tl.where(length > least, length, 1.0), 0.0)


@triton.jit
def orthogonalised(row, done, number, m, at, inside):
    """Orthogonalise ``row`` against the first ``number`` rows of ``done`` and normalise it, or return zeros."""
    row = normalised(row, 0.0)
    for _ in tl.static_range(2):
        total = tl.zeros_like(row)
        for other in range(number):
            direction = tl.load(done + other * m + at, inside, 0.0)
            total += tl.sum(direction * row, 0) * direction
        row -= total
    return normalised(row, LEAST)


@triton.jit(do_not_specialize=["key", "rows", "m"])
def orthonormalise(x, done, out, key, rows, m, SPARE: tl.constexpr, WIDTH: tl.constexpr):
    """Orthonormalise all rows in one program.

    All loads and stores of rows have one layout, so each thread reads only elements of ``done`` that it has written.

    Args:
        x: [rows, m].
        done: [rows, m] float64, written.
        out: [rows, m] float32, written.
        key: Key of the random rows that replace rows of zeros.
        rows: Number of rows.
        m: Number of elements of a row.
        SPARE: Whether to replace rows of zeros.
        WIDTH: A power of two, m or more.
    """
    at = tl.arange(0, WIDTH)
    inside = at < m
    for number in range(rows):
        row = orthogonalised(tl.load(x + number * m + at, inside, 0.0).to(tl.float64), done, number, m, at, inside)
        if SPARE:
            other = tl.where(inside, (drawn(number * m + at, key) - 0.5).to(tl.float64), 0.0)
            other = orthogonalised(other, done, number, m, at, inside)
            row = tl.where(tl.max(tl.abs(row), 0) > 0, row, other)
        tl.store(done + number * m + at, row, inside)
        tl.store(out + number * m + at, row.to(tl.float32), inside)
