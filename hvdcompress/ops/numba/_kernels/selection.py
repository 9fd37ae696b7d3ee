"""Kernels of ``numba/selection.py``. Vectors are float32, or their ``bits`` viewed as int32; offsets are int64."""

# mypy: disable-error-code="assignment"
# (Numba gives a variable the widest of its types; mypy gives it the type of the first assignment.)

from __future__ import annotations

import numpy as np

from hvdcompress.ops.numba._kernels import flags
from hvdcompress.ops.numba._kernels.compiling import BLOCK, MAGNITUDE, compiled


@compiled
def count(bits, low):
    """Return the number of magnitudes with bits of at least ``low``."""
    total = 0
    for start in range(0, bits.size, BLOCK):
        part = bits[start : start + BLOCK]
        count = np.int32(0)  # int32, so that the sum has as many lanes as the comparison
        for i in range(part.size):
            count += np.int32(1) if (part[i] & MAGNITUDE) >= low else np.int32(0)
        total += count
    return total


@compiled
def find(bits, low, span, out):
    """Write the indices of magnitudes with bits from low to low + span until ``out`` is full; return their number."""
    found = 0
    flag = np.zeros(BLOCK, np.int8)
    offsets = np.empty(BLOCK, np.int32)
    for start in range(0, bits.size, BLOCK):
        part = bits[start : start + BLOCK]
        if part.size < BLOCK:
            flag[:] = 0
        for i in range(part.size):
            flag[i] = np.int8(np.uint32((part[i] & MAGNITUDE) - low) <= span)
        count = min(flags.indices(flag, offsets), out.size - found)
        for j in range(count):
            out[found + j] = start + offsets[j]
        found += count
        if found == out.size:
            break
    return found


@compiled
def kth(magnitudes, k):
    """Return the k-th largest of the bits of magnitudes, 1 ≤ k ≤ n; overwrites them.

    A histogram of 2048 equal ranges shows in which range the k-th largest is. The kernel repeats this with the numbers
    of that range, until each range is a single number.
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
        number = 2047
        while count[number] < k:
            k -= count[number]
            number -= 1
        if shift == 0:
            return low + np.int32(number)
        found = 0
        for i in range(rest.size):
            value = rest[i]
            rest[found] = value
            found += np.int64((value - low) >> shift == number)
        rest = rest[:found]


@compiled
def largest_of(index, bits, values, parts, scratch, chosen, kept, least):
    """Select the k entries of largest magnitude in each part; ``least`` receives the smallest selected magnitude.

    The rows of ``parts`` [3, parts] are the number of candidates, k, and the number to add to the indices. ``chosen``
    and ``kept`` receive indices and values, and have one more element, because the loop writes before it decides.
    """
    begin = 0
    found = 0
    for part in range(parts.shape[1]):
        size = parts[0, part]
        k = parts[1, part]
        start = parts[2, part]
        least[part] = 0
        if k > 0:
            near = bits[begin : begin + size]
            magnitudes = scratch[:size]
            for i in range(size):
                magnitudes[i] = near[i] & MAGNITUDE
            low = kth(magnitudes, k)
            ties = k - count(near, low + np.int32(1))
            for i in range(size):
                magnitude = near[i] & MAGNITUDE
                # write first, then count the entry or not: a branch would be mispredicted often
                chosen[found] = index[begin + i] + start
                kept[found] = values[begin + i]
                equal = np.int64(magnitude == low) & np.int64(ties > 0)
                found += np.int64(magnitude > low) + equal
                ties -= equal
            least[part] = low
        begin += size


@compiled
def histogram(bits, stride):
    """Return a histogram [2048] of every stride-th |x|, by exponent and the first 3 bits of the mantissa."""
    count = np.zeros(2048, np.int64)
    for i in range(0, bits.size, stride):
        count[(bits[i] & MAGNITUDE) >> 20] += 1
    return count


@compiled
def first_of(x, most):
    """Return the index of the first |x| whose bits are ``most``. No branch, so that the loop vectorises."""
    ahead = np.int32(0)
    size = np.int32(x.size)
    for i in range(x.size):
        here = (np.float32(x[i]).view(np.int32) & MAGNITUDE) == most
        ahead = max(ahead, size - np.int32(i) if here else np.int32(0))
    return size - ahead
