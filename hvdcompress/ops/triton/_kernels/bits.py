"""The kernels of ``triton/bits.py``."""

import triton
import triton.language as tl

from hvdcompress.ops.triton._kernels.parts import places


@triton.jit
def pack_bits(values, out, n, num_bytes, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Each byte gathers the numbers that it has bits of."""
    at = places(BLOCK)
    first = 8 * at // WIDTH
    byte = tl.zeros((BLOCK,), tl.int64)
    for number in tl.static_range(7 // WIDTH + 2):
        place = first + number
        shift = place * WIDTH - 8 * at  # below 0 where the number begins in a byte before
        value = tl.load(values + place, place < n, 0).to(tl.int64)
        part = tl.where(shift < 0, value >> tl.maximum(-shift, 0), value << tl.minimum(tl.maximum(shift, 0), 8))
        byte |= part & 0xFF
    tl.store(out + at, byte.to(tl.uint8), at < num_bytes)


@triton.jit
def unpack_bits(buffer, out, n, num_bytes, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Each number gathers the bytes that it lies in: at most 8, as WIDTH is at most 57."""
    at = places(BLOCK)
    first, shift = at * WIDTH // 8, at * WIDTH % 8
    word = tl.zeros((BLOCK,), tl.int64)
    for number in tl.static_range((WIDTH + 14) // 8):
        place = first + number
        word |= tl.load(buffer + place, (at < n) & (place < num_bytes), 0).to(tl.int64) << 8 * number
    tl.store(out + at, (word >> shift) & ((1 << WIDTH) - 1), at < n)
