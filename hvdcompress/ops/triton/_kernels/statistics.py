"""Kernels of ``triton/statistics.py``."""

import triton
import triton.language as tl

from hvdcompress.ops.triton._kernels.parts import indices, note_not_finite


@triton.jit
def store_moments(x, sums):
    """Write Σx and Σx² of this program's elements to ``sums`` [programs, 2] float64."""
    wide = x.to(tl.float64)
    target = sums + 2 * tl.program_id(0).to(tl.int64)
    tl.store(target, tl.sum(wide, 0))
    tl.store(target + 1, tl.sum(wide * wide, 0))


@triton.jit
def moments(x, sums, n, BLOCK: tl.constexpr):
    at = indices(BLOCK)
    store_moments(tl.load(x + at, at < n, 0.0), sums)


@triton.jit
def all_finite(x, finite, n, BLOCK: tl.constexpr):
    at = indices(BLOCK)
    note_not_finite(tl.load(x + at, at < n, 0.0), finite)
