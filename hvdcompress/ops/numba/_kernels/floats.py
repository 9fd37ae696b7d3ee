"""Kernels of ``numba/floats.py``. Vectors are float32; ``bits`` of 16- and 32-bit floats are unsigned integers."""

# mypy: disable-error-code="assignment"
# (Numba gives a variable the widest of its types; mypy gives it the type of the first assignment.)

from __future__ import annotations

import numpy as np

from hvdcompress.ops.numba._kernels.compiling import BLOCK, MAGNITUDE, compiled
from hvdcompress.ops.numba._kernels.halves import float_of, half_of
from hvdcompress.ops.vectors import FP16_MAX


@compiled
def to_fp16(x, scale, limit, out):
    """Convert scale·x to float16. Return the number of clipped elements, and the bits of the largest |x|."""
    saturated = 0
    most = np.int32(0)
    for start in range(0, x.size, BLOCK):
        part = x[start : start + BLOCK]
        half = out[start : start + BLOCK]
        count = np.int32(0)  # int32, so that the sum has as many lanes as the comparison
        for i in range(part.size):
            most = max(most, np.float32(part[i]).view(np.int32) & MAGNITUDE)
            value = np.float32(part[i] * scale)
            count += np.int32(1) if np.float32(abs(value)) > limit else np.int32(0)
            value = limit if value > limit else value  # NaN stays NaN
            half[i] = half_of(-limit if value < -limit else value)
        saturated += count
    return saturated, most


@compiled
def add_fp16(half, scale, out, add, factor):
    """Set out = (out + scale·value)·factor, or without ``add`` out = scale·value·factor."""
    most = np.float32(FP16_MAX)
    for i in range(half.size):
        value = float_of(half[i])
        value = most if value > most else value  # Inf becomes 65504, NaN stays NaN
        value = (-most if value < -most else value) * scale
        out[i] = (out[i] + value) * factor if add else value * factor


@compiled
def sum_fp16(total, half):
    """Set total = total + half, rounded to nearest even as IEEE 754 specifies, including NaN and Inf."""
    for i in range(total.size):
        total[i] = half_of(np.float32(float_of(total[i]) + float_of(half[i])))


@compiled
def to_bf16(bits, out):
    for i in range(bits.size):
        b = bits[i]
        rounded = (b + np.uint32(0x7FFF) + (b >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
        largest = b >> np.uint32(16) & np.uint32(0x8000) | np.uint32(0x7F7F)
        out[i] = largest if (rounded & np.uint32(0x7FFF)) >= np.uint32(0x7F80) else rounded


@compiled
def add_scaled(values, scale, out, add, factor):
    """Set out = (out + values·scale)·factor, or without ``add`` out = values·scale·factor."""
    if add:
        for i in range(out.size):
            out[i] = (out[i] + values[i] * scale) * factor
    else:
        for i in range(out.size):
            out[i] = values[i] * scale * factor


@compiled
def add_bf16(half, scale, out, add, factor):
    """As :func:`add_fp16`, for the bits of bfloat16."""
    held = np.zeros(BLOCK, np.float32)
    bits = held.view(np.uint32)
    for start in range(0, half.size, BLOCK):
        h = half[start : start + BLOCK]
        o = out[start : start + BLOCK]
        for i in range(h.size):
            bits[i] = np.uint32(h[i]) << np.uint32(16)
        add_scaled(held, scale, o, add, factor)
