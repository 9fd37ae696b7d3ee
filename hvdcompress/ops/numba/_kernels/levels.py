"""Kernels of ``numba/codes.py`` for tables of levels. They return the same bits as the reference."""

# mypy: disable-error-code="assignment"
# (Numba gives a variable the widest of its types; mypy gives it the type of the first assignment.)

from __future__ import annotations

from functools import partial

import numpy as np

from hvdcompress.ops.numba._kernels import codes as packing
from hvdcompress.ops.numba._kernels.compiling import BLOCK, compiled
from hvdcompress.ops.numba._kernels.floats import add_scaled
from hvdcompress.ops.shared import FP32_MAX_BITS

_LOW = np.uint32(0xFFFF)
_WORDS = BLOCK // 32  # words of one bit per element


@compiled
def divide(x, norm, share):
    for i in range(x.size):
        share[i] = x[i] / norm


@compiled
def look_up(share_bits, steps, codes):
    """Count the edges below each number. ``share_bits`` are overwritten."""
    for i in range(share_bits.size):  # to unsigned integers in the order of the numbers
        negative = np.uint32(np.uint32(0) - np.uint32(share_bits[i] >> np.uint32(31)))
        share_bits[i] ^= np.uint32(negative | np.uint32(0x80000000))
    for i in range(share_bits.size):
        ordered = share_bits[i]
        carried = np.uint32(steps[ordered >> np.uint32(16)] + np.uint32(ordered & _LOW))
        codes[i] = carried >> np.uint32(16)


@compiled
def gather(codes, pairs, found):
    for i in range(codes.size):
        found[i] = pairs[codes[i]]


@partial(compiled, error_model="numpy")  # without a check for zeros the divisions vectorise
def round_at_random(share, low_and_gap, drawn, codes):
    for i in range(share.size):
        above = (share[i] - low_and_gap[2 * i]) / low_and_gap[2 * i + 1]
        codes[i] += np.uint32(np.float32(np.int32(drawn[i])) * np.float32(2.0**-24) < above)


@compiled
def encode(x, norms, bucket, steps, pairs, bits, random, key, out, begin, end):
    """Pack the index of each element's level, which is the number of edges below it.

    With ``random``, edges are the largest numbers below each level but the first, otherwise the middles between levels.
    ``steps``: [2^16] uint32, for each group of floats with equal upper 16 bits. Upper half: the number of edges below
    the group. Lower half: 0xFFFF minus the lower bits of the group's edge, of which there is at most one; so adding a
    number's lower 16 bits carries if the number is above the edge. 0 without an edge.
    ``pairs``: [2^bits] uint64, each level and its distance to the next one, which is Inf above the last level.
    """
    codes = np.zeros(BLOCK, np.uint32)
    share = np.zeros(BLOCK, np.float32)
    share_bits = np.zeros(BLOCK, np.uint32)
    words = np.zeros(bits * _WORDS, np.uint32)
    if random:
        drawn = np.zeros(BLOCK, np.uint32)
        found = np.zeros(BLOCK, np.uint64)
    for start in range(begin, end, BLOCK):
        stop = min(start + BLOCK, end)
        size = stop - start
        at = start
        while at < stop:
            until = min(stop, (at // bucket + 1) * bucket)
            norm = norms[at // bucket] if norms[at // bucket] > np.float32(0) else np.float32(1)
            divide(x[at:until], norm, share[at - start : until - start])
            at = until
        share_bits[:] = share.view(np.uint32)
        look_up(share_bits[:size], steps, codes)
        if random:
            packing.draw(np.uint32(start), key, drawn)
            gather(codes[:size], pairs, found)
            round_at_random(share[:size], found.view(np.float32), drawn, codes)
        codes[size:] = 0
        pack(codes, bits, words, out[start * bits // 8 : (stop * bits + 7) // 8])


@compiled
def pack(codes, bits, words, out):
    """Pack codes [BLOCK] to ``bits`` bits each, lowest bit first. ``words`` [bits·BLOCK/32] is scratch memory."""
    if bits <= 8:
        packing.pack(codes, bits, out)
        return
    held = np.uint64(0)
    filled = at = 0
    for i in range(codes.size):
        held |= np.uint64(codes[i]) << np.uint64(filled)
        filled += bits
        if filled >= 32:
            words[at] = held & np.uint64(0xFFFFFFFF)
            at += 1
            held >>= np.uint64(32)
            filled -= 32
    out[:] = words.view(np.uint8)[: out.size]


@compiled
def unpack(buffer, bits, levels, words, values):
    """Set the values to the levels of the codes in ``buffer``. ``words`` [bits·BLOCK/32 + 1] is scratch memory.

    Args:
        buffer: The codes.
        bits: Bits per code.
        levels: If codes do not cross bytes, the 8/bits levels of each byte [256·8/bits]; otherwise [2^bits].
        words: Scratch memory.
        values: Written.
    """
    pairs = levels.view(np.uint64)
    out = values.view(np.uint64)
    if bits == 8:
        for j in range(buffer.size):
            values[j] = levels[buffer[j]]
    elif bits == 4:
        for j in range(buffer.size):
            out[j] = pairs[buffer[j]]
    elif bits == 2:
        for j in range(buffer.size):
            i = 2 * np.uint64(buffer[j])
            a, b = pairs[i], pairs[i + np.uint64(1)]
            out[2 * j], out[2 * j + 1] = a, b
    elif bits == 1:
        for j in range(buffer.size):
            i = 4 * np.uint64(buffer[j])
            k = 4 * np.uint64(j)
            a, b, c, d = pairs[i], pairs[i + np.uint64(1)], pairs[i + np.uint64(2)], pairs[i + np.uint64(3)]
            out[k], out[k + np.uint64(1)], out[k + np.uint64(2)], out[k + np.uint64(3)] = a, b, c, d
    else:
        words.view(np.uint8)[: buffer.size] = buffer
        mask = np.uint64((1 << bits) - 1)
        bit = np.uint64(0)
        for i in range(values.size):
            word = bit >> np.uint64(5)
            held = np.uint64(words[word]) | np.uint64(words[word + np.uint64(1)]) << np.uint64(32)
            values[i] = levels[held >> (bit & np.uint64(31)) & mask]
            bit += np.uint64(bits)


@compiled
def add_levels(buffer, norm_bits, bucket, levels, bits, first, out, add, sign, factor):
    """Set out = (out ± level·norm)·factor, or without ``add`` out = ±level·norm·factor; out[0] is element ``first``.

    ``levels``: as for :func:`unpack`.
    """
    values = np.zeros(BLOCK, np.float32)
    words = np.zeros(bits * _WORDS + 1, np.uint32)
    safe = np.zeros(1, np.float32)
    safe_bits = safe.view(np.int32)
    for start in range(first - first % BLOCK, first + out.size, BLOCK):
        stop = min(start + BLOCK, first + out.size)
        unpack(buffer[start * bits // 8 : (stop * bits + 7) // 8], bits, levels, words, values)
        at = max(start, first)
        while at < stop:
            j = at // bucket
            until = min(stop, (j + 1) * bucket)
            # the norm of a damaged payload may be negative, NaN or Inf
            safe_bits[0] = min(max(norm_bits[j], np.int32(0)), np.int32(FP32_MAX_BITS))
            add_scaled(values[at - start :], safe[0] * sign, out[at - first : until - first], add, factor)
            at = until
