"""What kernels share: places, sums of gradient and residual, and what is not finite.

These modules have no ``from __future__ import annotations``: Triton reads the annotations of a kernel.
"""

import triton
import triton.language as tl


@triton.jit
def places(BLOCK: tl.constexpr):
    """The places of this program's elements [BLOCK] int64."""
    return tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def add(gradient, residual, scale, out, at, inside):
    """Write scale·gradient + residual at these places, and return it; 0 where ``inside`` is false."""
    x = tl.load(gradient + at, inside, 0.0) * scale + tl.load(residual + at, inside, 0.0)
    tl.store(out + at, x, inside)
    return x


@triton.jit
def note_not_finite(x, finite):
    """Set ``finite`` [1] to 0 if an element is not finite. Programs that do so at once write the same."""
    tl.store(finite, 0, tl.max(tl.where(tl.abs(x) < float("inf"), 0, 1)) == 1)


@triton.jit
def finite_norm(norm):
    """Read a norm that is negative, infinite or NaN as a finite number."""
    bits = norm.to(tl.int32, bitcast=True)
    return tl.minimum(tl.maximum(bits, 0), 0x7F7FFFFF).to(tl.float32, bitcast=True)
