"""Kernels of ``triton/statistics.py``."""

import triton
import triton.language as tl

from hvdcompress.ops.triton._kernels.parts import indices, note_not_finite


@triton.jit
def all_finite(x, finite, n, BLOCK: tl.constexpr):
    at = indices(BLOCK)
    note_not_finite(tl.load(x + at, at < n, 0.0), finite)
