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


@triton.jit
def dequantize(
    buffer,
    norms,
    out,
    n,
    num_bytes,
    BUCKET: tl.constexpr,
    BITS: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = indices(ROWS)
    lane = tl.arange(0, 8)
    byte_at = row[:, None] * BITS + lane[None, :]
    byte = tl.load(buffer + byte_at, (lane < BITS)[None, :] & (byte_at < num_bytes), 0)
    word = tl.sum(byte.to(tl.int64) << 8 * lane[None, :].to(tl.int64), 1)
    code = (word[:, None] >> BITS * lane[None, :].to(tl.int64)).to(tl.int32) & ((1 << BITS) - 1)
    at = row[:, None] * 8 + lane[None, :]
    inside = at < n
    level = (code & ((1 << (BITS - 1)) - 1)).to(tl.float32)
    level = tl.math.div_rn(level, tl.zeros_like(level) + ((1 << (BITS - 1)) - 1))
    level = tl.where(code >> (BITS - 1) != 0, 0.0 - level, level)  # 0 − 0 is +0: zeros have no sign
    value = level * finite_norm(norms_at(norms, at, inside, BUCKET))
    if ADD:
        value = tl.load(out + at, inside) + value
    tl.store(out + at, value, inside)


@triton.jit
def pack_signs(x, out, n, num_bytes, ROWS: tl.constexpr):
    row = indices(ROWS)
    lane = tl.arange(0, 8)
    at = row[:, None] * 8 + lane[None, :]
    minus = (tl.load(x + at, at < n, 0.0) < 0).to(tl.int32)
    tl.store(out + row, tl.sum(minus << lane[None, :], 1).to(tl.uint8), row < num_bytes)


@triton.jit
def unpack_signs(buffer, scale, out, n, num_bytes, BLOCK: tl.constexpr):
    at = indices(BLOCK)
    byte = tl.load(buffer + at // 8, (at < n) & (at // 8 < num_bytes), 0).to(tl.int32)
    size = finite_norm(tl.load(scale)).to(tl.int32, bitcast=True)
    bits = size ^ ((byte >> (at % 8).to(tl.int32)) << 31)
    tl.store(out + at, bits.to(tl.float32, bitcast=True), at < n)
