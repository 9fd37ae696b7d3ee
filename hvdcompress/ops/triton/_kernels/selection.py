"""The kernels of ``triton/selection.py``.

What is chosen is counted a program, the counts are added up, and each program then knows where its first index goes.
"""

import triton
import triton.language as tl

from hvdcompress.ops.triton._kernels.parts import places


@triton.jit
def is_chosen(x, threshold, EQUAL: tl.constexpr):
    """Whether |x| exceeds the threshold or, with EQUAL, is equal to it."""
    size = tl.abs(x)
    if EQUAL:
        hit = size == threshold
    else:
        hit = size > threshold
    return hit


@triton.jit
def offsets_of_largest(x, inside, column, WIDTH: tl.constexpr):
    """The column of the largest |x| of each row; among equals, the lowest."""
    bits = tl.where(inside, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, -1)  # ascend with the magnitudes
    return tl.min(tl.where(bits == tl.max(bits, 1)[:, None], column[None, :], WIDTH), 1)


@triton.jit
def before(ends):
    """How many were chosen before this program, given the sums of the counts up to each program's."""
    number = tl.program_id(0)
    return tl.load(ends + number - 1, number > 0, 0)


@triton.jit
def count(x, threshold, counts, n, EQUAL: tl.constexpr, BLOCK: tl.constexpr):
    at = places(BLOCK)
    chosen = (at < n) & is_chosen(tl.load(x + at, at < n, 0.0), threshold, EQUAL)
    tl.store(counts + tl.program_id(0), tl.sum(chosen.to(tl.int32), 0))


@triton.jit
def compact(x, threshold, ends, index, values, n, room, EQUAL: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr):
    """Write the first ``room`` of what :func:`count` counted; with VALUES, the elements too."""
    start = before(ends)
    if start < room:
        at = places(BLOCK)
        found = tl.load(x + at, at < n, 0.0)
        chosen = (at < n) & is_chosen(found, threshold, EQUAL)
        slot = start + tl.cumsum(chosen.to(tl.int32), 0) - 1
        kept = chosen & (slot < room)
        tl.store(index + slot, at, kept)
        if VALUES:
            tl.store(values + slot, found, kept)


@triton.jit
def count_two(x, threshold, counts, n, programs, BLOCK: tl.constexpr):
    """Count |x| above the threshold [1] and |x| equal to it, into the two rows of ``counts``."""
    at, number = places(BLOCK), tl.program_id(0)
    found, level = tl.load(x + at, at < n, 0.0), tl.load(threshold)
    tl.store(counts + number, tl.sum(((at < n) & is_chosen(found, level, False)).to(tl.int32), 0))
    tl.store(counts + programs + number, tl.sum(((at < n) & is_chosen(found, level, True)).to(tl.int32), 0))


@triton.jit
def compact_two(x, threshold, ends, index, n, k, programs, BLOCK: tl.constexpr):
    """Write the places of |x| above the threshold and, up to k in all, of the first that are equal to it."""
    at = places(BLOCK)
    found, level = tl.load(x + at, at < n, 0.0), tl.load(threshold)
    above, equal = (at < n) & is_chosen(found, level, False), (at < n) & is_chosen(found, level, True)
    room = k - tl.load(ends + programs - 1)
    equal_before = before(ends + programs)
    chosen = above | (equal & (equal_before + tl.cumsum(equal.to(tl.int32), 0) <= room))
    slot = before(ends) + tl.minimum(equal_before, room) + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(index + slot, at, chosen & (slot < k))


@triton.jit
def chunk_argmax(x, offset, n, chunk, chunks, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    row, column = places(ROWS), tl.arange(0, WIDTH)
    at = row[:, None] * chunk + column[None, :]
    inside = (column < chunk)[None, :] & (at < n)
    found = offsets_of_largest(tl.load(x + at, inside, 0.0), inside, column, WIDTH)
    tl.store(offset + row, found, row < chunks)
