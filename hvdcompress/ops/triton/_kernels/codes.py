"""Kernels of ``triton/codes.py``. A row of a program's tile is eight codes of BITS bits, which fill BITS bytes."""

import triton
import triton.language as tl

from hvdcompress.ops.shared import MIX_FACTORS
from hvdcompress.ops.triton._kernels.parts import finite_norm, indices

FIRST, SECOND = (tl.constexpr(factor) for factor in MIX_FACTORS)


@triton.jit
def mix(x):
    x = (x ^ (x >> 16)) * FIRST
    x = (x ^ (x >> 13)) * SECOND
    return x ^ (x >> 16)


@triton.jit
def drawn(at, key):
    """Return the numbers with the indices ``at`` of a key's random stream; ``key`` is the int32 with the key's bits."""
    word = (tl.zeros((1,), tl.int32) + key).to(tl.uint32, bitcast=True)
    bits = mix(mix(at.to(tl.uint32) + word) ^ word)
    return (bits >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08  # 2^-24


@triton.jit
def norms_at(norms, at, inside, BUCKET: tl.constexpr):
    """Return the norm of each element; with BUCKET 0 all elements have the first norm."""
    if BUCKET == 0:
        found = tl.load(norms + at * 0, inside, 1.0)
    else:
        found = tl.load(norms + at // BUCKET, inside, 1.0)
    return found


@triton.jit
def store_packed(out, code, row, num_bytes, BITS: tl.constexpr):
    """Store rows of eight codes [ROWS, 8] int64 in BITS bytes each."""
    lane = tl.arange(0, 8)
    word = tl.sum(code << BITS * lane[None, :].to(tl.int64), 1)  # no shared bits: the sum is an or
    byte_at = row[:, None] * BITS + lane[None, :]
    byte = (word[:, None] >> 8 * lane[None, :].to(tl.int64)) & 0xFF
    tl.store(out + byte_at, byte.to(tl.uint8), (lane < BITS)[None, :] & (byte_at < num_bytes))


@triton.jit(do_not_specialize=["key"])
def uniform(out, key, start, n, BLOCK: tl.constexpr):
    at = indices(BLOCK)
    tl.store(out + at, drawn(at + start, key), at < n)


@triton.jit(do_not_specialize=["key"])
def quantize(x, norms, out, key, n, num_bytes, BUCKET: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr):
    row = indices(ROWS)
    lane = tl.arange(0, 8)
    at = row[:, None] * 8 + lane[None, :]
    inside = at < n
    value = tl.load(x + at, inside, 0.0)
    norm = norms_at(norms, at, inside, BUCKET)
    share = tl.math.div_rn(tl.abs(value), tl.where(norm > 0, norm, 1.0))
    share = tl.where(share < 1.0, share, 1.0) * ((1 << (BITS - 1)) - 1)
    level = share.to(tl.int32)  # not tl.floor: its instruction treats denormals as zeros
    up = (drawn(at, key) < share - level.to(tl.float32)).to(tl.int64)
    sign = (value.to(tl.int32, bitcast=True) >> 31).to(tl.int64) & (1 << (BITS - 1))
    code = tl.where(inside, level.to(tl.int64) + up | sign, 0)
    store_packed(out, code, row, num_bytes, BITS)


@triton.jit(do_not_specialize=["key"])
def encode(
    x,
    norms,
    edges,
    levels,
    out,
    key,
    n,
    num_bytes,
    BUCKET: tl.constexpr,
    BITS: tl.constexpr,
    RANDOM: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Pack the index of each element's level, which is the number of edges below it.

    ``edges``: [2^BITS], the middles between levels; with RANDOM, the largest numbers below each level but the first.
    ``levels``: [2^BITS + 1]. Edges and levels have Inf after the last one.
    """
    row = indices(ROWS)
    lane = tl.arange(0, 8)
    at = row[:, None] * 8 + lane[None, :]
    inside = at < n
    norm = norms_at(norms, at, inside, BUCKET)
    share = tl.math.div_rn(tl.load(x + at, inside, 0.0), tl.where(norm > 0, norm, 1.0))
    code = (at * 0).to(tl.int32)
    for bit in tl.static_range(BITS):
        edge = tl.load(edges + code + ((1 << (BITS - 1 - bit)) - 1))
        code += (edge < share).to(tl.int32) << (BITS - 1 - bit)
    if RANDOM:
        low = tl.load(levels + code)
        gap = tl.load(levels + code + 1) - low  # Inf above the last level
        code += (drawn(at, key) < tl.math.div_rn(share - low, gap)).to(tl.int32)
    store_packed(out, tl.where(inside, code, 0).to(tl.int64), row, num_bytes, BITS)


@triton.jit
def decode(buffer, norms, levels, out, n, num_bytes, BUCKET: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Set out = level·norm. ``levels``: [2^BITS]. An index of at most 9 bits has bits in at most two bytes."""
    at = indices(BLOCK)
    first = at * BITS // 8
    inside = at < n
    word = tl.load(buffer + first, inside & (first < num_bytes), 0).to(tl.int32)
    word |= tl.load(buffer + first + 1, inside & (first + 1 < num_bytes), 0).to(tl.int32) << 8
    code = (word >> (at * BITS % 8).to(tl.int32)) & ((1 << BITS) - 1)
    value = tl.load(levels + code) * finite_norm(norms_at(norms, at, inside, BUCKET))
    tl.store(out + at, value, inside)


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
