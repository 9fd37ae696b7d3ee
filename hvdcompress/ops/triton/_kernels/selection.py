"""Kernels of ``triton/selection.py``.

A first kernel counts the selected elements of each program. The cumulative counts tell each program of a second kernel
where in the output its first index goes.
"""

import triton
import triton.language as tl

from hvdcompress.ops.triton._kernels.parts import indices


@triton.jit
def offsets_of_largest(x, inside, column, WIDTH: tl.constexpr):
    """Return the column of the largest |x| in each row; among equal magnitudes, the lowest."""
    bits = tl.where(inside, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, -1)  # in the order of the magnitudes
    return tl.min(tl.where(bits == tl.max(bits, 1)[:, None], column[None, :], WIDTH), 1)


@triton.jit
def before(ends):
    """Return the number of elements selected before this program, given the cumulative counts."""
    number = tl.program_id(0)
    return tl.load(ends + number - 1, number > 0, 0)


@triton.jit
def count(x, threshold, counts, n, BLOCK: tl.constexpr):
    at = indices(BLOCK)
    chosen = (at < n) & (tl.abs(tl.load(x + at, at < n, 0.0)) > threshold)
    tl.store(counts + tl.program_id(0), tl.sum(chosen.to(tl.int32), 0))


@triton.jit
def compact(x, threshold, ends, index, values, n, room, VALUES: tl.constexpr, BLOCK: tl.constexpr):
    """Write the first ``room`` indices that :func:`count` counted and, with VALUES, their elements."""
    start = before(ends)
    if start < room:
        at = indices(BLOCK)
        found = tl.load(x + at, at < n, 0.0)
        chosen = (at < n) & (tl.abs(found) > threshold)
        slot = start + tl.cumsum(chosen.to(tl.int32), 0) - 1
        kept = chosen & (slot < room)
        tl.store(index + slot, at, kept)
        if VALUES:
            tl.store(values + slot, found, kept)


@triton.jit
def count_two(x, threshold, counts, n, programs, BLOCK: tl.constexpr):
    """Count |x| above the threshold [1] and |x| equal to it, into the two rows of ``counts``."""
    at = indices(BLOCK)
    number = tl.program_id(0)
    found = tl.load(x + at, at < n, 0.0)
    level = tl.load(threshold)
    tl.store(counts + number, tl.sum(((at < n) & (tl.abs(found) > level)).to(tl.int32), 0))
    tl.store(counts + programs + number, tl.sum(((at < n) & (tl.abs(found) == level)).to(tl.int32), 0))


@triton.jit
def compact_two(x, threshold, ends, index, n, k, programs, BLOCK: tl.constexpr):
    """Write the indices of |x| above the threshold, then of the first |x| equal to it, k indices in all."""
    at = indices(BLOCK)
    found = tl.load(x + at, at < n, 0.0)
    level = tl.load(threshold)
    above = (at < n) & (tl.abs(found) > level)
    equal = (at < n) & (tl.abs(found) == level)
    room = k - tl.load(ends + programs - 1)
    equal_before = before(ends + programs)
    chosen = above | (equal & (equal_before + tl.cumsum(equal.to(tl.int32), 0) <= room))
    slot = before(ends) + tl.minimum(equal_before, room) + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(index + slot, at, chosen & (slot < k))
