"""The loops of ``numba/codes.py``; ``numpy/codes.py`` is their reference, to the bit.

The hash is cast to uint32 at each step, because numba would widen it. What a loop makes goes to arrays of a block,
which stay in the processor's nearest cache, and each loop does one thing: so the compiler finds vector instructions.
"""

# mypy: disable-error-code="assignment"
# (In a kernel a variable takes the widest of its types; Python's rule is the first.)

from __future__ import annotations

import numpy as np

from hvdcompress.ops.numba._kernels import flags
from hvdcompress.ops.numba._kernels.compiling import BLOCK, MAGNITUDE, compiled
from hvdcompress.ops.shared import FP32_MAX_BITS, MIX_FACTORS

_FIRST, _SECOND = MIX_FACTORS
_SPREAD, _EACH_BIT = np.uint64(0x0101010101010101), np.uint64(0x8040201008040201)
_RAISE = np.uint64(0x7F7F7F7F7F7F7F7F)


@compiled
def mix(x):
    x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(16))) * np.uint32(_FIRST))
    x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(13))) * np.uint32(_SECOND))
    return np.uint32(x ^ np.uint32(x >> np.uint32(16)))


@compiled
def draw(first, key, drawn):
    """The random numbers of the elements from ``first`` on, times 2^24."""
    for i in range(drawn.size):
        drawn[i] = mix(np.uint32(mix(np.uint32(np.uint32(first + np.uint32(i)) + key)) ^ key)) >> np.uint32(8)


@compiled
def turned(right, key):
    return mix(np.uint32(np.uint32(right * np.uint32(0x9E3779B1)) ^ key))


@compiled
def permuted(x, half, keys):
    mask = np.uint32((1 << half) - 1)
    a, b = np.uint32(x >> half), np.uint32(np.uint32(x) & mask)
    c = np.uint32(np.uint32(a ^ turned(b, keys[0])) & mask)
    d = np.uint32(np.uint32(b ^ turned(c, keys[1])) & mask)
    e = np.uint32(np.uint32(c ^ turned(d, keys[2])) & mask)
    f = np.uint32(np.uint32(d ^ turned(e, keys[3])) & mask)
    return np.int64(e) << half | np.int64(f)


@compiled
def distinct_indices(half, keys, n, out, other):
    """``other``: like ``out``. Returns which of the two has the indices."""
    left, found = out.size, 0
    for i in range(left):
        other[i] = i
    while left:  # all that are still out of range side by side: up to three of four are
        for i in range(left):
            other[i] = permuted(np.int64(other[i]), half, keys)
        again = 0
        for i in range(left):
            place = other[i]
            out[found] = place  # as this one is not found yet, there is room
            other[again] = place
            found += place < n
            again += place >= n
        left = again
    swapped = False
    for shift in range(0, 2 * half, 11):  # sorted by 11 bits at a time: 2048 counters stay in the nearest cache
        begins = np.zeros(2049, np.int64)
        for i in range(out.size):
            begins[(out[i] >> shift & 2047) + 1] += 1
        for digit in range(2048):
            begins[digit + 1] += begins[digit]
        for i in range(out.size):
            digit = out[i] >> shift & 2047
            other[begins[digit]] = out[i]
            begins[digit] += 1
        out, other, swapped = other, out, not swapped
    return swapped


# -- codes of 1 to 8 bits, without gaps, lowest bit first ------------------------------------------------------------


@compiled
def pack_signs(x, flag, out):
    """``flag``: [BLOCK] int8."""
    for start in range(0, x.size, BLOCK):
        part = x[start : start + BLOCK]
        if part.size < BLOCK:
            flag[:] = 0
        for i in range(part.size):
            flag[i] = np.int8(part[i] < np.float32(0))
        flags.pack(flag, out[start // 8 : (start + BLOCK) // 8])


@compiled
def pack(codes, width, out):
    if width == 8:
        for j in range(out.size):
            out[j] = codes[j]
    elif width == 4:
        for j in range(out.size):
            out[j] = codes[2 * j] | codes[2 * j + 1] << np.uint8(4)
    elif width == 2:
        for j in range(out.size):
            low, high = (
                codes[4 * j] | codes[4 * j + 1] << np.uint8(2),
                codes[4 * j + 2] | codes[4 * j + 3] << np.uint8(2),
            )
            out[j] = low | high << np.uint8(4)
    else:  # eight codes make ``width`` bytes
        for group in range(-(-out.size // width)):
            held, place = np.uint64(0), group * width
            for i in range(8):
                held |= np.uint64(codes[8 * group + i]) << np.uint64(i * width)
            for i in range(min(width, out.size - place)):
                out[place + i] = held & np.uint64(0xFF)
                held >>= np.uint64(8)


@compiled
def unpack(buffer, width, levels):
    """Signs and levels as numbers −s … s; with one bit, −1 or 1. ``levels``: [BLOCK] int8."""
    if width == 8:
        for j in range(buffer.size):
            level = np.int8(buffer[j] & np.uint8(0x7F))
            levels[j] = -level if buffer[j] & np.uint8(0x80) else level
    elif width == 4:
        for j in range(buffer.size):
            low, high = np.int8(buffer[j] & np.uint8(7)), np.int8(buffer[j] >> np.uint8(4) & np.uint8(7))
            levels[2 * j] = -low if buffer[j] & np.uint8(0x08) else low
            levels[2 * j + 1] = -high if buffer[j] & np.uint8(0x80) else high
    elif width == 2:
        for j in range(buffer.size):
            for i in range(4):
                code = buffer[j] >> np.uint8(2 * i)
                level = np.int8(code & np.uint8(1))
                levels[4 * j + i] = -level if code & np.uint8(2) else level
    elif width == 1:
        eight = levels.view(np.uint64)
        for j in range(buffer.size):
            bits = np.uint64(buffer[j]) * _SPREAD & _EACH_BIT  # byte i has bit i, or 0
            eight[j] = (bits + _RAISE) >> np.uint64(7) & _SPREAD
        for i in range(8 * buffer.size):
            levels[i] = np.int8(1) - np.int8(2) * levels[i]
    else:
        sign = np.uint64(1 << (width - 1))
        for group in range(-(-buffer.size // width)):
            held, place = np.uint64(0), group * width
            for i in range(min(width, buffer.size - place)):
                held |= np.uint64(buffer[place + i]) << np.uint64(8 * i)
            for i in range(8):
                level = np.int8(held & (sign - np.uint64(1)))
                levels[8 * group + i] = -level if held & sign else level
                held >>= np.uint64(width)


# -- levels ----------------------------------------------------------------------------------------------------------


@compiled
def largest(bits):
    most = np.int32(0)
    for i in range(bits.size):
        most = max(most, bits[i] & MAGNITUDE)
    return most


@compiled
def round_at_random(x, bits, drawn, norm, levels, sign, top, codes):
    for i in range(x.size):
        share = abs(x[i]) / norm
        share = (share if share < np.float32(1) else np.float32(1)) * levels
        level = np.int32(share)
        up = np.float32(np.int32(drawn[i])) * np.float32(2.0**-24) < share - np.float32(level)
        codes[i] = np.uint32(level + np.int32(up)) | (np.uint32(bits[i]) >> sign & top)


@compiled
def quantize(x, bits_of_x, norms, norm_bits, find, bucket, width, key, out, begin, end):
    """Quantize elements ``begin`` to ``end``; ``find``: set the norms to each bucket's greatest magnitude first."""
    levels, sign = np.float32((1 << (width - 1)) - 1), np.uint32(32 - width)
    top = np.uint32(1 << (width - 1))
    codes, drawn = np.zeros(BLOCK, np.uint8), np.zeros(BLOCK, np.uint32)
    for start in range(begin, end, BLOCK):
        stop = min(start + BLOCK, end)
        draw(np.uint32(start), key, drawn)
        if stop - start < BLOCK:
            codes[:] = 0
        at = start
        while at < stop:
            j = at // bucket
            until = min(stop, (j + 1) * bucket)
            if find and at == j * bucket:
                norm_bits[j] = largest(bits_of_x[at : min((j + 1) * bucket, x.size)])
            norm = norms[j] if norms[j] > np.float32(0) else np.float32(1)
            part, bits, number = x[at:until], bits_of_x[at:until], drawn[at - start : until - start]
            round_at_random(part, bits, number, norm, levels, sign, top, codes[at - start : until - start])
            at = until
        pack(codes, width, out[start * width // 8 : (stop * width + 7) // 8])


@compiled
def add_levels(level, high, low, unit, out, add, factor):
    """Set out = (out + level/s·unit)·factor, or without ``add`` out = level/s·unit·factor; 1/s = ``high`` + ``low``.

    level·high is exact, so that level·high + level·low is the float32 next to level/s, as a division's result is.
    """
    if low == np.float32(0) and add:
        for i in range(out.size):
            out[i] = (out[i] + np.float32(level[i]) * unit) * factor
    elif low == np.float32(0):
        for i in range(out.size):
            out[i] = np.float32(level[i]) * unit * factor
    elif add:
        for i in range(out.size):
            value = np.float32(level[i])
            out[i] = (out[i] + (value * high + value * low) * unit) * factor
    else:
        for i in range(out.size):
            value = np.float32(level[i])
            out[i] = (value * high + value * low) * unit * factor


@compiled
def add_codes(buffer, norm_bits, bucket, width, high, low, first, out, add, sign, factor):
    """Set out = (out ± value)·factor, or without ``add`` out = ±value·factor; ``first``: the place of out[0]."""
    levels = np.zeros(BLOCK, np.int8)
    safe = np.zeros(1, np.float32)
    safe_bits = safe.view(np.int32)
    begin = first - first % BLOCK
    for start in range(begin, first + out.size, BLOCK):
        stop = min(start + BLOCK, first + out.size)
        unpack(buffer[start * width // 8 : (stop * width + 7) // 8], width, levels)
        at = max(start, first)
        while at < stop:
            j = at // bucket
            end = min(stop, (j + 1) * bucket)
            part, level = out[at - first : end - first], levels[at - start : end - start]
            safe_bits[0] = min(
                max(norm_bits[j], np.int32(0)), np.int32(FP32_MAX_BITS)
            )  # as read from a damaged payload
            add_levels(level, high, low, safe[0] * sign, part, add, factor)
            at = end


# -- fields that add -------------------------------------------------------------------------------------------------


@compiled
def halve(numbers, other, width):
    """Make numbers of twice the width: of two neighbours, one."""
    for i in range(other.size):
        other[i] = numbers[2 * i] + (numbers[2 * i + 1] << np.int32(width))
    for i in range(other.size):
        numbers[i] = other[i]


@compiled
def pack_fields(numbers, other, per, width, words):
    """``numbers``, ``other``: [BLOCK] int32; both are overwritten."""
    while per % 2 == 0:
        per //= 2
        halve(numbers, other[: words.size * per], width)
        width *= 2
    s = np.int32(width)
    if per == 5:  # of 32 // width only 1, 3 and 5 are odd, or odd when halved
        for k in range(words.size):
            at = np.uint64(5) * np.uint64(k)  # unsigned, so that numba does not ask whether it counts from the end
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
    numbers, other, drawn = np.zeros(BLOCK, np.int32), np.zeros(BLOCK, np.int32), np.zeros(BLOCK, np.uint32)
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
    """As :func:`add_codes`, of scale·numbers.

    With ``bound`` added to each field, none is below 0, and none borrows from the next.
    """
    per = 32 // width
    step = BLOCK // per * per
    mask, low, raised = np.int32((1 << width) - 1), np.int32(bound), np.uint32(0)
    shift, held = np.zeros(step, np.int32), np.zeros(step + 16, np.uint32)
    held_bits = held.view(np.int32)
    for j in range(per):
        raised += np.uint32(np.uint32(bound) << np.uint32(width * j))
        shift[j::per] = np.int32(width * j)
    numbers = np.zeros(step, np.float32)
    for start in range(first - first % step, first + out.size, step):
        stop = min(start + step, first + out.size)
        some = words[start // per : (stop + per - 1) // per]
        place = np.uint64(0)  # unsigned, so that numba does not ask whether it counts from the end
        for k in range(some.size):  # each word for each of its fields, of which there are 16 at most
            word = np.uint32(np.uint32(some[k]) + raised)
            for j in range(16):
                held[place + np.uint64(j)] = word
            place += np.uint64(per)
        for i in range(step):
            field = np.int32(held_bits[i] >> shift[i]) & mask
            numbers[i] = np.float32(np.int32(field - low)) * scale
        at = max(start, first)
        part, number = out[at - first : stop - first], numbers[at - start :]
        if add:
            for i in range(part.size):
                part[i] = (part[i] + number[i]) * factor
        else:
            for i in range(part.size):
                part[i] = number[i] * factor
