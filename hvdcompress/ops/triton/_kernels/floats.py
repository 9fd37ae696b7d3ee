"""Kernels of ``triton/floats.py``."""

import triton
import triton.language as tl

from hvdcompress.ops.triton._kernels.parts import indices


@triton.jit
def clipped(x, limit):
    """Clip x to ±limit; NaN stays NaN."""
    return tl.where(x > limit, limit, tl.where(x < -limit, -limit, x))


@triton.jit
def float_of_half(half):
    """Convert float16 to float32; ±Inf becomes ±65504."""
    return clipped(half.to(tl.float32), 65504.0)


@triton.jit
def to_fp16(x, scale, limit, out, counts, n, BLOCK: tl.constexpr):
    at = indices(BLOCK)
    scaled = tl.load(x + at, at < n, 0.0) * scale
    tl.store(out + at, clipped(scaled, limit).to(tl.float16), at < n)
    tl.store(counts + tl.program_id(0), tl.sum((tl.abs(scaled) > limit).to(tl.int32), 0))


@triton.jit
def from_fp16(half, scale, out, n, BLOCK: tl.constexpr):
    at = indices(BLOCK)
    tl.store(out + at, float_of_half(tl.load(half + at, at < n)) * scale, at < n)


@triton.jit
def to_bf16(x, out, n, BLOCK: tl.constexpr):
    at = indices(BLOCK)
    bits = tl.load(x + at, at < n, 0.0).to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    largest = ((bits >> 31) & -0x8000) | 0x7F7F
    tl.store(out + at, tl.where((rounded & 0x7FFF) >= 0x7F80, largest, rounded).to(tl.int16), at < n)


@triton.jit
def from_bf16(bits, out, n, BLOCK: tl.constexpr):
    at = indices(BLOCK)
    tl.store(out + at, (tl.load(bits + at, at < n).to(tl.int32) << 16).to(tl.float32, bitcast=True), at < n)
