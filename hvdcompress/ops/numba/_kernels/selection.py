"""The loops of ``numba/selection.py``. Arguments: float32 vectors, or their ``bits`` as int32; offsets as int64."""

# mypy: disable-error-code="assignment"
# (In a kernel a variable takes the widest of its types; Python's rule is the first.)

from __future__ import annotations

import numpy as np

from hvdcompress.ops.numba._kernels import flags
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
    flag, place = np.zeros(BLOCK, np.int8), np.empty(BLOCK, np.int32)
    for start in range(0, bits.size, BLOCK):
        part = bits[start : start + BLOCK]
        if part.size < BLOCK:
            flag[:] = 0
        for i in range(part.size):
            flag[i] = np.int8(np.uint32((part[i] & MAGNITUDE) - low) <= span)
        count = min(flags.places(flag, place), out.size - found)
        for j in range(count):
            out[found + j] = start + place[j]
        found += count
        if found == out.size:
            break
    return found


@compiled
def kth(magnitudes, k):
    """The k-th largest of the bits of magnitudes, 1 ≤ k ≤ n; overwrites them.

    A histogram of 2048 equal ranges tells in which range it is. Its numbers are sorted in the same way, until they are
    one.
    """
    rest = magnitudes
    count = np.empty(2049, np.int64)
    while True:
        low, high = rest[0], rest[0]
        for i in range(rest.size):
            low, high = min(low, rest[i]), max(high, rest[i])
        shift = 0
        while (high - low) >> shift > 2047:
            shift += 1
        count[:] = 0
        for i in range(rest.size):
            count[(rest[i] - low) >> shift] += 1
        place = 2047
        while count[place] < k:
            k -= count[place]
            place -= 1
        if shift == 0:
            return low + np.int32(place)
        found = 0
        for i in range(rest.size):
            value = rest[i]
            rest[found] = value
            found += np.int64((value - low) >> shift == place)
        rest = rest[:found]


@compiled
def largest_of(index, bits, values, parts, scratch, chosen, kept, least):
    """Of each part the k entries of greatest magnitude, and the least of these.

    ``parts`` has their numbers of entries, how many to choose, and what is added to ``index``. ``chosen`` and ``kept``
    receive the entries, and have room for one more.
    """
    begin, found = 0, 0
    for part in range(parts.shape[1]):
        size, k, start = parts[0, part], parts[1, part], parts[2, part]
        least[part] = 0
        if k > 0:
            near, magnitudes = bits[begin : begin + size], scratch[:size]
            for i in range(size):
                magnitudes[i] = near[i] & MAGNITUDE
            low = kth(magnitudes, k)
            ties = k - count(near, low + np.int32(1))
            for i in range(size):
                magnitude = near[i] & MAGNITUDE
                # without a branch, which would go either way
                chosen[found], kept[found] = index[begin + i] + start, values[begin + i]
                equal = np.int64(magnitude == low) & np.int64(ties > 0)
                found += np.int64(magnitude > low) + equal
                ties -= equal
            least[part] = low
        begin += size


@compiled
def places(magnitudes, threshold, ties, out):
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
def first_of(x, most):
    """Where the first |x| with these bits is; without a branch, so that many are looked at together."""
    ahead, size = np.int32(0), np.int32(x.size)
    for i in range(x.size):
        here = (np.float32(x[i]).view(np.int32) & MAGNITUDE) == most
        ahead = max(ahead, size - np.int32(i) if here else np.int32(0))
    return size - ahead


@compiled
def chunk_argmax(x, chunk, out):
    for j in range(out.size):
        part = x[j * chunk : (j + 1) * chunk]
        most = np.int32(0)
        for i in range(part.size):
            most = max(most, np.float32(part[i]).view(np.int32) & MAGNITUDE)
        out[j] = first_of(part, most)


@compiled
def chunk_positions(offset, chunk, sizes, out):
    j, start = 0, 0
    for size in sizes:
        for first in range(start, start + size, chunk):
            out[j] = min(first + offset[j], start + size - 1)
            j += 1
        start += size
