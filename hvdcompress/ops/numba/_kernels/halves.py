"""Conversions between float32 and the 16 bits of float16, by processor instructions or by integer arithmetic.

Both give the same bits, except for the payload of a NaN.
"""

# mypy: disable-error-code="assignment, no-untyped-def"

from __future__ import annotations

import platform
from typing import Any

import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.extending import intrinsic

from hvdcompress.ops.numba._kernels.compiling import compiled


@intrinsic
def half_by_processor(context: Any, value: Any) -> Any:
    """As :func:`half_by_arithmetic`. Without F16C or ARM's conversions, LLVM would call a missing function."""

    def written(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), written


@intrinsic
def float_by_processor(context: Any, half: Any) -> Any:
    """As :func:`float_by_arithmetic`."""

    def written(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), written


@compiled
def half_by_arithmetic(value):
    """Convert a float32 to the bits of a float16, rounded to nearest even."""
    size = np.float32(abs(value))
    bits = size.view(np.uint32)
    # rebias the exponent by 112 (0x38 << 24), and round the 13 dropped bits to nearest even (+ 0xFFF)
    normal = (bits - np.uint32(0x37FFF001) + (bits >> np.uint32(13) & np.uint32(1))) >> np.uint32(13)
    # below 2^-14, float16 numbers are multiples of 2^-24; adding 0.5 in float32 rounds to such multiples
    tiny = np.float32(size + np.float32(0.5)).view(np.uint32) - np.uint32(0x3F000000)
    found = tiny if bits < np.uint32(0x38800000) else normal
    found = np.uint32(0x7C00) if bits >= np.uint32(0x477FF000) else found  # half a unit beyond the largest float16
    found = np.uint32(0x7E00) if bits > np.uint32(0x7F800000) else found
    return np.uint16(np.float32(value).view(np.uint32) >> np.uint32(16) & np.uint32(0x8000) | found)


@compiled
def float_by_arithmetic(half):
    """Convert the bits of a float16 to float32."""
    word = np.uint32(half)
    m = word & np.uint32(0x7FFF)
    # rebias the exponent by 112, and that of Inf and NaN by 224
    held = np.uint32((m << np.uint32(13)) + np.uint32(0x38000000 if m < np.uint32(0x7C00) else 0x70000000))
    tiny = np.float32(np.int32(m)) * np.float32(2.0**-24)
    value = tiny if m < np.uint32(0x400) else held.view(np.float32)
    return -value if word >= np.uint32(0x8000) else value


#: whether the processor has instructions for both conversions
CONVERTS = bool(get_host_cpu_features().get("f16c")) or platform.machine().lower() in ("aarch64", "arm64")
half_of, float_of = (half_by_processor, float_by_processor) if CONVERTS else (half_by_arithmetic, float_by_arithmetic)
