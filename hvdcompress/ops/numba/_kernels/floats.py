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


@compiled
def range_space(top, low, width, shift):
    """As ``shared.range_space``, for numbers instead of arrays; ``top`` and ``low`` are the bits of the bounds."""
    top = top >> shift
    low = low >> shift
    room = (1 << width) - 1
    first = max((top + low + 3 - room) >> 1, max(top, low) + 1 - room, 1)
    return np.int32(first), np.int32(max(top - first + 1, 0)), np.int32(max(low - first + 1, 0))


@compiled
def range_codes(bits, top, low, width, shift, out):
    """Encode float32 numbers, given as ``bits`` int32."""
    first, positive, negative = range_space(top, low, width, shift)
    for i in range(bits.size):
        number = np.int32((bits[i] & MAGNITUDE) >> shift) - (first - np.int32(1))
        below = min(number, negative)
        below = positive + below if below > 0 else np.int32(0)
        out[i] = below if bits[i] < 0 else max(min(number, positive), np.int32(0))


@compiled
def range_values(codes, top, low, width, shift, out):
    """Decode codes to float32 numbers, written as bits int32."""
    first, positive, negative = range_space(top, low, width, shift)
    last = positive + negative
    below = first - np.int32(1)
    half = np.int32(1) << shift >> np.int32(1)
    for i in range(codes.size):
        code = np.int32(min(codes[i], np.int64(last)))
        minus = code > positive
        number = code - positive if minus else code
        middle = min(np.int32(((number + below) << shift) + half), np.int32(low if minus else top))
        middle = middle | np.int32(-0x80000000) if minus else middle
        out[i] = middle if code else np.int32(0)
