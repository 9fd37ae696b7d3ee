"""Kernels of ``numba/levels.py``. They return the same bits as ``numpy/levels.py``."""

# mypy: disable-error-code="assignment"
# (Numba gives a variable the widest of its types; mypy gives it the type of the first assignment.)

from __future__ import annotations

import numpy as np

from hvdcompress.ops.numba._kernels.codes import draw
from hvdcompress.ops.numba._kernels.compiling import BLOCK, compiled
from hvdcompress.ops.shared import FP32_MAX_BITS


@compiled
def search(share, edges, bits, codes):
    """Count the edges below each number, by halving: one pass over the numbers per bit, so that it vectorises."""
    codes[: share.size] = 0
    step = np.int32(1 << (bits - 1))
    while step:
        for i in range(share.size):
            codes[i] += step * np.int32(edges[codes[i] + step - 1] < share[i])
        step >>= 1


@compiled
def look_up(share, share_bits, least, edges, codes):
    """Count the edges below each number, where no 2^16 neighbouring floats have more than one edge between them."""
    for i in range(share.size):
        low = least[share_bits[i] >> np.uint32(16)]
        codes[i] = np.int32(low) + np.int32(edges[low] < share[i])


@compiled
def encode(x, norms, bucket, edges, least, levels, bits, random, key, out, begin, end):
    """Pack the index of each element's level, which is the number of edges below it.

    ``edges``: [2^bits], the middles between levels; with ``random``, the largest numbers below each level but the
    first. ``least``: [2^16], the least index of all floats whose upper 16 bits are those; empty to search instead.
    ``levels``: [2^bits + 1]. Edges and levels have Inf after the last one.
    """
    drawn = np.zeros(BLOCK, np.uint32)
    codes = np.zeros(BLOCK, np.int32)
    share = np.zeros(BLOCK, np.float32)
    share_bits = share.view(np.uint32)
    for start in range(begin, end, BLOCK):
        stop = min(start + BLOCK, end)
        at = start
        while at < stop:
            until = min(stop, (at // bucket + 1) * bucket)
            norm = norms[at // bucket] if norms[at // bucket] > np.float32(0) else np.float32(1)
            for i in range(at, until):
                share[i - start] = x[i] / norm
            at = until
        if least.size:
            look_up(share[: stop - start], share_bits, least, edges, codes)
        else:
            search(share[: stop - start], edges, bits, codes)
        if random:
            draw(np.uint32(start), key, drawn)
            for i in range(stop - start):
                low = levels[codes[i]]
                gap = levels[codes[i] + 1] - low  # Inf above the last level
                codes[i] += np.int32(np.float32(np.int32(drawn[i])) * np.float32(2.0**-24) < (share[i] - low) / gap)
        codes[stop - start :] = 0
        pack(codes, bits, out[start * bits // 8 : (stop * bits + 7) // 8])


@compiled
def pack(codes, bits, out):
    """Pack codes to ``bits`` bits each, lowest bit first."""
    if bits == 8:
        for j in range(out.size):
            out[j] = codes[j]
        return
    if bits == 4:
        for j in range(out.size):
            out[j] = codes[2 * j] | codes[2 * j + 1] << 4
        return
    held = np.uint64(0)
    filled = 0
    at = 0
    for j in range(out.size):
        while filled < 8:
            held |= np.uint64(codes[at]) << np.uint64(filled)
            at += 1
            filled += bits
        out[j] = held & np.uint64(0xFF)
        held >>= np.uint64(8)
        filled -= 8


@compiled
def decode(buffer, norm_bits, bucket, levels, bits, out, begin, end):
    """Set out = level·norm for elements ``begin`` to ``end``. ``levels``: [2^bits]."""
    safe = np.zeros(1, np.float32)
    safe_bits = safe.view(np.int32)
    mask = np.uint64((1 << bits) - 1)
    held = np.uint64(0)
    filled = 0
    byte = begin * bits // 8
    at = begin
    while at < end:
        until = min(end, (at // bucket + 1) * bucket)
        # the norm of a damaged payload may be negative, NaN or Inf
        safe_bits[0] = min(max(norm_bits[at // bucket], np.int32(0)), np.int32(FP32_MAX_BITS))
        if bits == 8:
            for i in range(at, until):
                out[i] = levels[buffer[i]] * safe[0]
        else:
            for i in range(at, until):
                while filled < bits:
                    held |= np.uint64(buffer[byte]) << np.uint64(filled)
                    byte += 1
                    filled += 8
                out[i] = levels[np.int64(held & mask)] * safe[0]
                held >>= np.uint64(bits)
                filled -= bits
        at = until
