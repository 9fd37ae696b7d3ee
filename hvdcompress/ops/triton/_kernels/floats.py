"""Kernels of ``triton/floats.py``."""

import triton
import triton.language as tl

from hvdcompress.ops.triton._kernels.parts import indices


@triton.jit
def clipped(x, limit):
    """Clip x to ±limit; NaN stays NaN."""
    return tl.where(x > limit, limit, tl.where(x < -limit, -limit, x))


@triton.jit
def to_fp16(x, scale, limit, out, counts, n, BLOCK: tl.constexpr):
    at = indices(BLOCK)
    scaled = tl.load(x + at, at < n, 0.0) * scale
    tl.store(out + at, clipped(scaled, limit).to(tl.float16), at < n)
    tl.store(counts + tl.program_id(0), tl.sum((tl.abs(scaled) > limit).to(tl.int32), 0))
