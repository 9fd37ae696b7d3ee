"""The loops of ``numba/floats.py``. Arguments: float32 vectors; the ``bits`` of 16- and 32-bit floats as unsigned."""

# mypy: disable-error-code="assignment"
# (In a kernel a variable takes the widest of its types; Python's rule is the first.)

from __future__ import annotations

import numpy as np

from hvdcompress.ops.numba._kernels.compiling import BLOCK, MAGNITUDE, compiled
from hvdcompress.ops.vectors import FP16_MAX


@compiled
def to_fp16(x, scale, limit, out):
    """Returns how many were clipped, and the bits of the greatest |x|."""
    saturated, most = 0, np.int32(0)
    for start in range(0, x.size, BLOCK):
        part, half = x[start : start + BLOCK], out[start : start + BLOCK]
        count = np.int32(0)  # narrow: as many lanes as the comparison
        for i in range(part.size):
            most = max(most, np.float32(part[i]).view(np.int32) & MAGNITUDE)
            value = np.float32(part[i] * scale)
            size = np.float32(abs(value))
            count += np.int32(1) if size > limit else np.int32(0)
            size = np.float32(min(size, limit))
            bits = size.view(np.uint32)
            # move the exponent by 112 (0x38 << 24), round the 13 dropped bits to nearest even (+ 0xFFF)
            normal = (bits - np.uint32(0x37FFF001) + (bits >> np.uint32(13) & np.uint32(1))) >> np.uint32(13)
            # below 2^-14 halves are multiples of 2^-24, to which adding 0.5 rounds
            tiny = np.float32(size + np.float32(0.5)).view(np.uint32) - np.uint32(0x3F000000)
            sign = value.view(np.uint32) >> np.uint32(16) & np.uint32(0x8000)
            half[i] = sign | (tiny if bits < np.uint32(0x38800000) else normal)
        saturated += count
    return saturated, most


@compiled
def add_fp16(half, scale, out, add, factor):
    """Set out = (out + scale·value)·factor, or without ``add`` out = scale·value·factor."""
    for i in range(half.size):
        word = np.uint32(half[i])
        m = word & np.uint32(0x7FFF)
        held = np.uint32((m << np.uint32(13)) + np.uint32(0x38000000)).view(np.float32)  # with its exponent moved
        tiny = np.float32(np.int32(m)) * np.float32(2.0**-24)
        value = tiny if m < np.uint32(0x400) else min(held, np.float32(FP16_MAX))
        value = np.float32(np.nan) if m > np.uint32(0x7C00) else value
        value = (-value if word >= np.uint32(0x8000) else value) * scale
        out[i] = (out[i] + value) * factor if add else value * factor


@compiled
def sum_fp16(total, half):
    """Set total = total + half, rounded to nearest even as IEEE 754 says; Inf and NaN included."""
    for i in range(total.size):
        a, b = np.uint32(total[i]), np.uint32(half[i])
        m, n = a & np.uint32(0x7FFF), b & np.uint32(0x7FFF)
        # the exponent moved by 112; those of Inf and NaN by as much again
        x = np.uint32((m << np.uint32(13)) + np.uint32(0x38000000 if m < np.uint32(0x7C00) else 0x70000000))
        y = np.uint32((n << np.uint32(13)) + np.uint32(0x38000000 if n < np.uint32(0x7C00) else 0x70000000))
        tiny_x, tiny_y = np.float32(np.int32(m)) * np.float32(2.0**-24), np.float32(np.int32(n)) * np.float32(2.0**-24)
        left = tiny_x if m < np.uint32(0x400) else x.view(np.float32)
        right = tiny_y if n < np.uint32(0x400) else y.view(np.float32)
        left = -left if a >= np.uint32(0x8000) else left
        right = -right if b >= np.uint32(0x8000) else right
        value = np.float32(left + right)
        size = np.float32(abs(value))
        bits = size.view(np.uint32)
        normal = (bits - np.uint32(0x37FFF001) + (bits >> np.uint32(13) & np.uint32(1))) >> np.uint32(13)
        tiny = np.float32(size + np.float32(0.5)).view(np.uint32) - np.uint32(0x3F000000)
        found = tiny if bits < np.uint32(0x38800000) else normal
        found = np.uint32(0x7C00) if bits >= np.uint32(0x477FF000) else found  # half a step beyond the largest
        found = np.uint32(0x7E00) if bits > np.uint32(0x7F800000) else found
        total[i] = (value.view(np.uint32) >> np.uint32(16) & np.uint32(0x8000)) | found


@compiled
def to_bf16(bits, out):
    for i in range(bits.size):
        b = bits[i]
        rounded = (b + np.uint32(0x7FFF) + (b >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
        largest = b >> np.uint32(16) & np.uint32(0x8000) | np.uint32(0x7F7F)
        out[i] = largest if (rounded & np.uint32(0x7FFF)) >= np.uint32(0x7F80) else rounded


@compiled
def from_bf16(bits, out):
    for i in range(bits.size):
        out[i] = np.uint32(bits[i]) << np.uint32(16)


@compiled
def add_bf16(half, scale, out, add, factor):
    """As :func:`add_fp16`."""
    held = np.zeros(BLOCK, np.float32)
    bits = held.view(np.uint32)
    for start in range(0, half.size, BLOCK):
        h, o = half[start : start + BLOCK], out[start : start + BLOCK]
        for i in range(h.size):
            bits[i] = np.uint32(h[i]) << np.uint32(16)
        if add:
            for i in range(h.size):
                o[i] = (o[i] + held[i] * scale) * factor
        else:
            for i in range(h.size):
                o[i] = held[i] * scale * factor


@compiled
def range_codes(bits, first, positive, negative, shift, out):
    """``bits``: of float32, as int32."""
    for i in range(bits.size):
        number = np.int32((bits[i] & MAGNITUDE) >> shift) - (first - np.int32(1))
        below = min(number, negative)
        below = positive + below if below > 0 else np.int32(0)
        out[i] = below if bits[i] < 0 else max(min(number, positive), np.int32(0))


@compiled
def range_values(codes, edges, first, positive, negative, shift, out):
    """``out``: the bits of float32, as int32."""
    last, below, half = positive + negative, first - np.int32(1), np.int32(1) << shift >> np.int32(1)
    for i in range(codes.size):
        code = np.int32(min(codes[i], np.int64(last)))
        minus = code > positive
        number = code - positive if minus else code
        middle = min(np.int32(((number + below) << shift) + half), edges[1] if minus else edges[0])
        middle = middle | np.int32(-0x80000000) if minus else middle
        out[i] = middle if code else np.int32(0)
