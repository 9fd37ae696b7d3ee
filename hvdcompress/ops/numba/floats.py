"""Floats, compiled: 16-bit floats (see :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

import numpy as np

from hvdcompress.ops.numba._kernels import floats as kernels
from hvdcompress.ops.numba.arrays import plain
from hvdcompress.ops.numba.threads import in_ranges
from hvdcompress.ops.numpy import NumpyOps
from hvdcompress.ops.vectors import FP16_MAX
from hvdcompress.ops.vectors import NumpyArray as Array


def clipped_to_fp16(x: Array, scale: float, limit: float, out: Array) -> tuple[int, int]:
    """Convert scale·x to float16. Return the number of clipped elements, and the bits of the largest |x|."""
    bits = out.view(np.uint16)

    def convert(start: int, stop: int) -> tuple[int, int]:
        return kernels.to_fp16(x[start:stop], np.float32(scale), np.float32(limit), bits[start:stop])

    clipped, largest = zip(*in_ranges(convert, x.size, kernels.BLOCK), strict=True)
    return int(sum(clipped)), max(largest)


class FloatOps(NumpyOps):
    """16-bit floats."""

    def to_fp16(self, x: Array, scale: float, limit: float = FP16_MAX, out: Array | None = None) -> tuple[Array, int]:
        out = np.empty(x.size, np.float16) if out is None else out
        if not plain(x) or not 0 < limit <= FP16_MAX or not plain(out, dtype=np.float16) or out.size != x.size:
            return super().to_fp16(x, scale, limit, out)
        return out, clipped_to_fp16(x, scale, limit, out)[0]

    def add_all(self, arrays: list[Array], into_first: bool = False) -> Array:
        if not all(plain(array, dtype=np.float16) for array in arrays):
            return super().add_all(arrays, into_first)
        total = arrays[0] if into_first else arrays[0].copy()
        for array in arrays[1:]:
            kernels.sum_fp16(total.view(np.uint16), array.view(np.uint16))
        return total

    def to_bf16(self, x: Array, out: Array | None = None) -> Array:
        bits = np.empty(x.size, np.int16) if out is None else out.view(np.int16)
        if not plain(x) or not plain(bits, dtype=np.int16) or bits.size != x.size:
            return super().to_bf16(x, out)
        kernels.to_bf16(x.view(np.uint32), bits.view(np.uint16))
        return bits if out is None else out
