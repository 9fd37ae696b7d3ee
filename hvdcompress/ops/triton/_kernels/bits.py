"""Kernels of ``triton/bits.py``."""

import triton
import triton.language as tl

from hvdcompress.ops.triton._kernels.parts import indices


@triton.jit
def pack_bits(values, out, n, num_bytes, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Each lane computes one byte from the integers that have bits in it."""
    at = indices(BLOCK)
    first = 8 * at // WIDTH
    byte = tl.zeros((BLOCK,), tl.int64)
    for number in tl.static_range(7 // WIDTH + 2):
        i = first + number
        shift = i * WIDTH - 8 * at  # negative if the integer begins in an earlier byte
        value = tl.load(values + i, i < n, 0).to(tl.int64)
        part = tl.where(shift < 0, value >> tl.maximum(-shift, 0), value << tl.minimum(tl.maximum(shift, 0), 8))
        byte |= part & 0xFF
    tl.store(out + at, byte.to(tl.uint8), at < num_bytes)


@triton.jit
def unpack_bits(buffer, out, n, num_bytes, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Each lane computes one integer from the bytes that it has bits in: at most 8, because WIDTH is at most 57."""
    at = indices(BLOCK)
    first = at * WIDTH // 8
    shift = at * WIDTH % 8
    word = tl.zeros((BLOCK,), tl.int64)
    for number in tl.static_range((WIDTH + 14) // 8):
        i = first + number
        word |= tl.load(buffer + i, (at < n) & (i < num_bytes), 0).to(tl.int64) << 8 * number
    tl.store(out + at, (word >> shift) & ((1 << WIDTH) - 1), at < n)
