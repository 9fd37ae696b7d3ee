"""Kernels of ``numba/codes.py``. They return the same bits as the reference.

The hash is cast to uint32 at each step, because numba would widen it. Each loop does one thing, so that it vectorises;
its results go to arrays of one BLOCK, which stay in the first-level cache.
"""

# mypy: disable-error-code="assignment"
# (Numba gives a variable the widest of its types; mypy gives it the type of the first assignment.)

from __future__ import annotations

import numpy as np

from hvdcompress.ops.numba._kernels.compiling import BLOCK, compiled
from hvdcompress.ops.shared import MIX_FACTORS

_FIRST, _SECOND = MIX_FACTORS


@compiled
def mix(x):
    x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(16))) * np.uint32(_FIRST))
    x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(13))) * np.uint32(_SECOND))
    return np.uint32(x ^ np.uint32(x >> np.uint32(16)))


@compiled
def draw(first, key, drawn):
    """Write the random numbers of the elements from ``first`` on, times 2^24, to ``drawn``."""
    for i in range(drawn.size):
        drawn[i] = mix(np.uint32(mix(np.uint32(np.uint32(first + np.uint32(i)) + key)) ^ key)) >> np.uint32(8)


@compiled
def round_function(right, key):
    """Return the output of one round of the Feistel network."""
    return mix(np.uint32(np.uint32(right * np.uint32(0x9E3779B1)) ^ key))


@compiled
def permuted(x, half, keys):
    """Return the image of x under the permutation of 2·half bits, a Feistel network of four rounds."""
    mask = np.uint32((1 << half) - 1)
    a = np.uint32(x >> half)
    b = np.uint32(np.uint32(x) & mask)
    c = np.uint32(np.uint32(a ^ round_function(b, keys[0])) & mask)
    d = np.uint32(np.uint32(b ^ round_function(c, keys[1])) & mask)
    e = np.uint32(np.uint32(c ^ round_function(d, keys[2])) & mask)
    f = np.uint32(np.uint32(d ^ round_function(e, keys[3])) & mask)
    return np.int64(e) << half | np.int64(f)


@compiled
def distinct_indices(half, keys, n, out):
    """Write distinct indices below n to ``out``, unsorted."""
    for i in range(out.size):
        index = permuted(i, half, keys)
        while index >= n:  # out of range: permute again
            index = permuted(index, half, keys)
        out[i] = index


# -- codes of 1 to 8 bits, without gaps, lowest bit first ------------------------------------------------------------


@compiled
def pack(codes, width, out):
    """Pack codes, one per element, to ``width`` bits each. ``codes`` has zeros up to a multiple of 8."""
    if width == 8:
        for j in range(out.size):
            out[j] = codes[j]
    elif width == 4:
        for j in range(out.size):
            out[j] = codes[2 * j] | codes[2 * j + 1] << np.uint8(4)
    elif width == 2:
        for j in range(out.size):
            low = codes[4 * j] | codes[4 * j + 1] << np.uint8(2)
            high = codes[4 * j + 2] | codes[4 * j + 3] << np.uint8(2)
            out[j] = low | high << np.uint8(4)
    else:  # eight codes fill ``width`` bytes
        for group in range(-(-out.size // width)):
            held = np.uint64(0)
            first_byte = group * width
            for i in range(8):
                held |= np.uint64(codes[8 * group + i]) << np.uint64(i * width)
            for i in range(min(width, out.size - first_byte)):
                out[first_byte + i] = held & np.uint64(0xFF)
                held >>= np.uint64(8)


# -- levels ----------------------------------------------------------------------------------------------------------


@compiled
def round_at_random(x, bits, drawn, norm, levels, sign, top, codes):
    for i in range(x.size):
        share = abs(x[i]) / norm
        share = (share if share < np.float32(1) else np.float32(1)) * levels
        level = np.int32(share)
        up = np.float32(np.int32(drawn[i])) * np.float32(2.0**-24) < share - np.float32(level)
        codes[i] = np.uint32(level + np.int32(up)) | (np.uint32(bits[i]) >> sign & top)


@compiled
def quantize(x, bits_of_x, norms, bucket, width, key, out, begin, end):
    """Quantize elements ``begin`` to ``end``."""
    levels = np.float32((1 << (width - 1)) - 1)
    sign = np.uint32(32 - width)
    top = np.uint32(1 << (width - 1))
    codes = np.zeros(BLOCK, np.uint8)
    drawn = np.zeros(BLOCK, np.uint32)
    for start in range(begin, end, BLOCK):
        stop = min(start + BLOCK, end)
        draw(np.uint32(start), key, drawn)
        if stop - start < BLOCK:
            codes[:] = 0
        at = start
        while at < stop:
            j = at // bucket
            until = min(stop, (j + 1) * bucket)
            norm = norms[j] if norms[j] > np.float32(0) else np.float32(1)
            part = x[at:until]
            bits = bits_of_x[at:until]
            number = drawn[at - start : until - start]
            round_at_random(part, bits, number, norm, levels, sign, top, codes[at - start : until - start])
            at = until
        pack(codes, width, out[start * width // 8 : (stop * width + 7) // 8])


# -- fields that add -------------------------------------------------------------------------------------------------


@compiled
def halve(numbers, other, width):
    """Combine pairs of neighbouring fields into one field of twice the width."""
    for i in range(other.size):
        other[i] = numbers[2 * i] + (numbers[2 * i + 1] << np.int32(width))
    for i in range(other.size):
        numbers[i] = other[i]


@compiled
def pack_fields(numbers, other, per, width, words):
    """Pack ``per`` fields into each word. ``numbers`` and ``other`` [BLOCK] int32 are overwritten."""
    while per % 2 == 0:
        per //= 2
        halve(numbers, other[: words.size * per], width)
        width *= 2
    s = np.int32(width)
    if per == 5:  # 32 // width, halved until it is odd, is 1, 3 or 5
        for k in range(words.size):
            at = np.uint64(5) * np.uint64(k)  # unsigned, so that numba does not check for negative indices
            high = np.int32(np.int32(numbers[at + np.uint64(4)] << s) + numbers[at + np.uint64(3)])
            high = np.int32(np.int32(high << s) + numbers[at + np.uint64(2)])
            high = np.int32(np.int32(high << s) + numbers[at + np.uint64(1)])
            words[k] = np.int32(high << s) + numbers[at]
    elif per == 3:
        for k in range(words.size):
            high = np.int32(np.int32(numbers[3 * k + 2] << s) + numbers[3 * k + 1])
            words[k] = np.int32(high << s) + numbers[3 * k]
    else:
        for k in range(words.size):
            words[k] = numbers[k]


@compiled
def quantize_fields(x, limit, norm, width, key, words, begin, end):
    per = 32 // width
    step = BLOCK // per * per
    numbers = np.zeros(BLOCK, np.int32)
    other = np.zeros(BLOCK, np.int32)
    drawn = np.zeros(BLOCK, np.uint32)
    for start in range(begin, end, step):
        part = x[start : min(start + step, end)]
        draw(np.uint32(start), key, drawn)
        for i in range(part.size):
            share = min(abs(part[i]), limit) / norm
            up = np.float32(np.int32(drawn[i])) * np.float32(2.0**-24) < share
            numbers[i] = (np.int32(-1) if part[i] < np.float32(0) else np.int32(1)) if up else np.int32(0)
        numbers[part.size :] = 0
        pack_fields(numbers, other, per, width, words[start // per : (start + step) // per])


@compiled
def add_fields(words, width, bound, scale, first, out, add, factor):
    """As :func:`add_codes`, for the values scale·field.

    ``bound`` is added to each field before the fields are separated: no field is then negative, and none borrows from
    the next.
    """
    per = 32 // width
    step = BLOCK // per * per
    mask = np.int32((1 << width) - 1)
    low = np.int32(bound)
    raised = np.uint32(0)
    shift = np.zeros(step, np.int32)
    held = np.zeros(step + 16, np.uint32)
    held_bits = held.view(np.int32)
    for j in range(per):
        raised += np.uint32(np.uint32(bound) << np.uint32(width * j))
        shift[j::per] = np.int32(width * j)
    numbers = np.zeros(step, np.float32)
    for start in range(first - first % step, first + out.size, step):
        stop = min(start + step, first + out.size)
        some = words[start // per : (stop + per - 1) // per]
        target = np.uint64(0)  # unsigned, so that numba does not check for negative indices
        for k in range(some.size):  # copy each word once per field; there are at most 16 fields
            word = np.uint32(np.uint32(some[k]) + raised)
            for j in range(16):
                held[target + np.uint64(j)] = word
            target += np.uint64(per)
        for i in range(step):
            field = np.int32(held_bits[i] >> shift[i]) & mask
            numbers[i] = np.float32(np.int32(field - low)) * scale
        at = max(start, first)
        part = out[at - first : stop - first]
        number = numbers[at - start :]
        if add:
            for i in range(part.size):
                part[i] = (part[i] + number[i]) * factor
        else:
            for i in range(part.size):
                part[i] = number[i] * factor
