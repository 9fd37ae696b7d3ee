"""Functions that several kernels use: indices, sums of gradient and residual, and the check for NaN and Inf.

The modules of kernels have no ``from __future__ import annotations``, because Triton evaluates a kernel's annotations.
"""

import triton
import triton.language as tl


@triton.jit
def indices(BLOCK: tl.constexpr):
    """Return the indices of this program's elements [BLOCK] int64."""
    return tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def add(gradient, residual, scale, out, at, inside):
    """Write scale·gradient + residual at the indices ``at``, and return it; 0 where ``inside`` is false."""
    x = tl.load(gradient + at, inside, 0.0) * scale + tl.load(residual + at, inside, 0.0)
    tl.store(out + at, x, inside)
    return x


@triton.jit
def note_not_finite(x, finite):
    """Set ``finite`` [1] to 0 if an element is NaN or Inf. All programs that write it write the same value."""
    tl.store(finite, 0, tl.max(tl.where(tl.abs(x) < float("inf"), 0, 1)) == 1)


@triton.jit
def finite_norm(norm):
    """Read a norm that is negative, infinite or NaN as a finite number."""
    bits = norm.to(tl.int32, bitcast=True)
    return tl.minimum(tl.maximum(bits, 0), 0x7F7FFFFF).to(tl.float32, bitcast=True)
