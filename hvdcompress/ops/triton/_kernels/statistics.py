"""The kernels of ``triton/statistics.py``."""

import triton
import triton.language as tl

from hvdcompress.ops.triton._kernels.parts import note_not_finite, places


@triton.jit
def store_moments(x, sums):
    """Write Σx and Σx² of this program's elements, in float64, into ``sums`` [programs, 2]."""
    wide, place = x.to(tl.float64), sums + 2 * tl.program_id(0).to(tl.int64)
    tl.store(place, tl.sum(wide, 0))
    tl.store(place + 1, tl.sum(wide * wide, 0))


@triton.jit
def moments(x, sums, n, BLOCK: tl.constexpr):
    at = places(BLOCK)
    store_moments(tl.load(x + at, at < n, 0.0), sums)


@triton.jit
def all_finite(x, finite, n, BLOCK: tl.constexpr):
    at = places(BLOCK)
    note_not_finite(tl.load(x + at, at < n, 0.0), finite)
