"""Floats: 16-bit floats and range floats (documented in :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdcompress.ops import shared
from hvdcompress.ops.vectors import FP16_MAX
from hvdcompress.ops.vectors import NumpyArray as Array


def to_fp16(x: Array, scale: float, limit: float = FP16_MAX, out: Array | None = None) -> tuple[Array, int]:
    scaled = x * np.float32(scale)
    saturated = np.count_nonzero(np.abs(scaled) > np.float32(limit))
    out = np.empty(x.size, np.float16) if out is None else out
    out[...] = np.clip(scaled, -np.float32(limit), np.float32(limit))
    return out, int(saturated)


def from_fp16(x: Array, scale: float) -> Array:
    return np.clip(x.astype(np.float32), -FP16_MAX, FP16_MAX) * np.float32(scale)


def to_bf16(x: Array, out: Array | None = None) -> Array:
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16
    rounded = np.where((rounded & 0x7FFF) >= 0x7F80, (bits >> 16) & 0x8000 | 0x7F7F, rounded)
    rounded = rounded.astype(np.uint16)
    if out is None:
        return rounded
    out[...] = rounded.view(np.uint8)
    return out


def from_bf16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def float_bounds(x: Array) -> Array:
    return np.array([x.max(initial=0), -x.min(initial=0)], np.float32) + np.float32(0)  # -0 becomes 0


def range_mantissa(x: Array, bounds: Array, bits: int) -> Array:
    tried = np.arange(*shared.range_span(bits), dtype=np.int32)
    edges = range_space(bounds, bits, 0)[0]
    errors = shared.range_errors(np.ascontiguousarray(x).view(np.int32), edges, bits, 23 - tried[:, None], np)
    return tried[errors.argmin()].astype(np.uint8).reshape(1)


def range_codes(x: Array, bounds: Array, bits: int, mantissa: int | Array) -> Array:
    shift = range_shift(mantissa)
    space = range_space(bounds, bits, shift)[1:]
    return shared.range_codes_of(np.ascontiguousarray(x).view(np.int32), space, shift, np)


def range_values(codes: Array, bounds: Array, bits: int, mantissa: int | Array) -> Array:
    shift = range_shift(mantissa)
    edges, first, positive, negative = range_space(bounds, bits, shift)
    found = shared.range_bits_of(codes.astype(np.int32), edges, (first, positive, negative), shift, np)
    return found.astype(np.int32, copy=False).view(np.float32)


def range_shift(mantissa: int | Array) -> Any:
    """Return 23 − mantissa: a number, or [1] int32 for an array; an array may be damaged and is clipped."""
    return 23 - (mantissa if isinstance(mantissa, int) else np.clip(mantissa.astype(np.int32), 1, 22))


def range_space(bounds: Array, bits: int, shift: Any) -> tuple[Array, Array, Array, Array]:
    """Return the bits [2] int32 of finite bounds, and :func:`hvdcompress.ops.shared.range_space`."""
    edges = np.clip(bounds.view(np.int32), 0, shared.FP32_MAX_BITS)  # damaged bounds become finite
    return edges, *shared.range_space(edges, bits, shift, np)
