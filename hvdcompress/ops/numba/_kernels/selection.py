"""The loops of ``numba/selection.py``. Arguments: the ``bits`` of float32 vectors as int32; offsets as int64."""

# mypy: disable-error-code="assignment"
# (In a kernel a variable takes the widest of its types; Python's rule is the first.)

from __future__ import annotations

import numpy as np

from hvdcompress.ops.numba._kernels.compiling import BLOCK, MAGNITUDE, compiled


@compiled
def count(bits, low):
    total = 0
    for start in range(0, bits.size, BLOCK):
        part = bits[start : start + BLOCK]
        count = np.int32(0)  # narrow: as many lanes as the comparison
        for i in range(part.size):
            count += np.int32(1) if (part[i] & MAGNITUDE) >= low else np.int32(0)
        total += count
    return total


@compiled
def find(bits, low, span, out):
    """Indices with low ≤ |bits| ≤ low + span, until ``out`` is full; returns how many."""
    found = 0
    flag = np.zeros(BLOCK, np.uint8)
    eight = flag.view(np.uint64)  # most groups of eight hold none
    for start in range(0, bits.size, BLOCK):
        part = bits[start : start + BLOCK]
        if part.size < BLOCK:
            flag[:] = 0
        for i in range(part.size):
            flag[i] = np.uint32((part[i] & MAGNITUDE) - low) <= span
        for group in range(eight.size):
            if eight[group]:
                for i in range(8 * group, 8 * group + 8):
                    if flag[i]:
                        if found == out.size:
                            return found
                        out[found] = start + i
                        found += 1
    return found


@compiled
def choose(magnitudes, threshold, ties, out):
    """Where magnitudes are above the threshold, and the first ``ties`` that are equal to it; ``out`` has one more."""
    found = 0
    for i in range(magnitudes.size):
        equal = magnitudes[i] == threshold and ties > 0
        out[found] = i  # without a branch, which would go either way
        found += magnitudes[i] > threshold or equal
        ties -= equal


@compiled
def histogram(bits, stride):
    """How many of every stride-th |x| share sign-less exponent and first 3 bits of the mantissa [2048]."""
    count = np.zeros(2048, np.int64)
    for i in range(0, bits.size, stride):
        count[(bits[i] & MAGNITUDE) >> 20] += 1
    return count


@compiled
def chunk_argmax(bits, chunk, out):
    for j in range(out.size):
        part = bits[j * chunk : (j + 1) * chunk]
        best = np.int64(-1)
        for i in range(part.size):  # one number for magnitude and place: a plain maximum, lowest place first
            best = max(best, np.int64(part[i] & MAGNITUDE) << 32 | (0x7FFFFFFF - i))
        out[j] = 0x7FFFFFFF - (best & 0x7FFFFFFF)


@compiled
def chunk_positions(offset, chunk, sizes, out):
    j, start = 0, 0
    for size in sizes:
        for first in range(start, start + size, chunk):
            out[j] = min(first + offset[j], start + size - 1)
            j += 1
        start += size
