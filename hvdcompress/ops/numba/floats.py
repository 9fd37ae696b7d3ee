"""Floats, compiled: 16-bit floats and range floats (see :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

import numpy as np

from hvdcompress.ops import numpy as reference
from hvdcompress.ops.numba._kernels import floats as kernels
from hvdcompress.ops.numba.arrays import ONE, plain
from hvdcompress.ops.numba.threads import in_ranges
from hvdcompress.ops.shared import FP32_MAX_BITS, range_span
from hvdcompress.ops.vectors import FP16_MAX
from hvdcompress.ops.vectors import NumpyArray as Array


def to_fp16(x: Array, scale: float, limit: float = FP16_MAX, out: Array | None = None) -> tuple[Array, int]:
    out = np.empty(x.size, np.float16) if out is None else out
    if not plain(x) or not 0 < limit <= FP16_MAX or not plain(out, dtype=np.float16) or out.size != x.size:
        return reference.to_fp16(x, scale, limit, out)
    return out, clipped_to_fp16(x, scale, limit, out)[0]


def clipped_to_fp16(x: Array, scale: float, limit: float, out: Array) -> tuple[int, int]:
    """Convert scale·x to float16. Return the number of clipped elements, and the bits of the largest |x|."""
    bits = out.view(np.uint16)

    def convert(start: int, stop: int) -> tuple[int, int]:
        return kernels.to_fp16(x[start:stop], np.float32(scale), np.float32(limit), bits[start:stop])

    clipped, largest = zip(*in_ranges(convert, x.size, kernels.BLOCK), strict=True)
    return int(sum(clipped)), max(largest)


def from_fp16(x: Array, scale: float) -> Array:
    if not plain(x, dtype=np.float16):
        return reference.from_fp16(x, scale)
    out = np.empty(x.size, np.float32)
    kernels.add_fp16(x.view(np.uint16), np.float32(scale), out, False, ONE)
    return out


def add_all(arrays: list[Array], into_first: bool = False) -> Array:
    if not all(plain(array, dtype=np.float16) for array in arrays):
        return reference.add_all(arrays, into_first)
    total = arrays[0] if into_first else arrays[0].copy()
    for array in arrays[1:]:
        kernels.sum_fp16(total.view(np.uint16), array.view(np.uint16))
    return total


def to_bf16(x: Array, out: Array | None = None) -> Array:
    bits = np.empty(x.size, np.uint16) if out is None else out.view(np.uint16)
    if not plain(x) or not plain(bits, dtype=np.uint16) or bits.size != x.size:
        return reference.to_bf16(x, out)
    kernels.to_bf16(x.view(np.uint32), bits)
    return bits if out is None else out


def from_bf16(bits: Array) -> Array:
    if not plain(bits, dtype=np.uint16):
        return reference.from_bf16(bits)
    out = np.empty(bits.size, np.float32)
    kernels.from_bf16(bits, out.view(np.uint32))
    return out


def range_mantissa(x: Array, bounds: Array, bits: int) -> Array:
    chosen = kernels.range_mantissa(np.ascontiguousarray(x).view(np.int32), *_edges(bounds), bits, *range_span(bits))
    return np.array([chosen], np.uint8)


def range_codes(x: Array, bounds: Array, bits: int, mantissa: int | Array) -> Array:
    if not plain(x):
        return reference.range_codes(x, bounds, bits, mantissa)
    out = np.empty(x.size, np.int32)
    kernels.range_codes(x.view(np.int32), *_edges(bounds), bits, _shift(mantissa), out)
    return out


def range_values(codes: Array, bounds: Array, bits: int, mantissa: int | Array) -> Array:
    if not plain(codes, dtype=np.int64):
        return reference.range_values(codes, bounds, bits, mantissa)
    out = np.empty(codes.size, np.float32)
    kernels.range_values(codes, *_edges(bounds), bits, _shift(mantissa), out.view(np.int32))
    return out


def _edges(bounds: Array) -> list[int]:
    """Return the bits of both bounds; damaged bounds become finite."""
    return [min(max(edge, 0), FP32_MAX_BITS) for edge in bounds.view(np.int32).tolist()]


def _shift(mantissa: int | Array) -> np.int32:
    """Return 23 − mantissa, for a number or an array; an array may be damaged and is clipped."""
    return np.int32(23 - (mantissa if isinstance(mantissa, int) else min(max(int(mantissa[0]), 1), 22)))
