"""Floats: 16-bit floats and range floats (documented in :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

from typing import Any

import torch

from hvdcompress.ops import shared
from hvdcompress.ops.torch.tensors import f32, view_as
from hvdcompress.ops.vectors import FP16_MAX, Array


def to_fp16(x: Array, scale: float, limit: float = FP16_MAX, out: Array | None = None) -> tuple[Array, Array]:
    scaled = x * f32(scale)
    saturated = (scaled.abs() > f32(limit)).sum()
    half = scaled.clamp_(-f32(limit), f32(limit)).to(torch.float16)
    return (half if out is None else out.copy_(half)), saturated


def from_fp16(x: Array, scale: float) -> Array:
    return x.to(torch.float32).clamp_(-FP16_MAX, FP16_MAX).mul_(f32(scale))


def to_bf16(x: Array, out: Array | None = None) -> Array:
    bits = x.contiguous().view(torch.int32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # a signed shift: fits int16
    largest = ((bits >> 31) & -0x8000) | 0x7F7F
    half = torch.where((rounded & 0x7FFF) >= 0x7F80, largest, rounded).to(torch.int16)
    return half if out is None else out.copy_(view_as(half, torch.uint8))


def from_bf16(bits: Array) -> Array:
    return (bits.to(torch.int32) << 16).view(torch.float32)


def float_bounds(x: Array) -> Array:
    if not len(x):
        return x.new_zeros(2)
    return torch.stack([x.max(), -x.min()]).clamp(min=0) + 0.0  # -0 becomes 0


def range_mantissa(x: Array, bounds: Array, bits: int) -> Array:
    tried = torch.arange(*shared.range_span(bits), dtype=torch.int32, device=x.device)
    x = x.contiguous().view(torch.int32)
    errors = shared.range_errors(x, _edges(bounds), bits, 23 - tried[:, None], torch)
    return tried[errors.argmin().reshape(1)].to(torch.uint8)


def range_codes(x: Array, bounds: Array, bits: int, mantissa: int | Array) -> Array:
    shift = _shift(mantissa)
    space = shared.range_space(_edges(bounds), bits, shift, torch)
    return shared.range_codes_of(x.contiguous().view(torch.int32), space, shift, torch)


def range_values(codes: Array, bounds: Array, bits: int, mantissa: int | Array) -> Array:
    shift = _shift(mantissa)
    edges = _edges(bounds)
    space = shared.range_space(edges, bits, shift, torch)
    return shared.range_bits_of(codes.to(torch.int32), edges, space, shift, torch).view(torch.float32)


def _shift(mantissa: int | Array) -> Any:
    """Return 23 − mantissa: a number, or [1] int32 for an array; an array may be damaged and is clipped."""
    return 23 - (mantissa if isinstance(mantissa, int) else mantissa.to(torch.int32).clamp(1, 22))


def _edges(bounds: Array) -> Array:
    """Return the bits of the bounds [2] int32; damaged bounds become finite."""
    return bounds.view(torch.int32).clamp(0, shared.FP32_MAX_BITS)
