"""float16 in kernels, as its 16 bits: converted by the processor where it can, else by integer arithmetic.

Either way gives the same bits, but for what else is in a NaN.
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
    """As :func:`half_by_arithmetic`; without F16C or ARM's conversions LLVM would call a function that is not there."""

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
    """The bits of a float32 as float16, rounded to nearest even."""
    size = np.float32(abs(value))
    bits = size.view(np.uint32)
    # move the exponent by 112 (0x38 << 24), round the 13 dropped bits to nearest even (+ 0xFFF)
    normal = (bits - np.uint32(0x37FFF001) + (bits >> np.uint32(13) & np.uint32(1))) >> np.uint32(13)
    # below 2^-14 halves are multiples of 2^-24, to which adding 0.5 rounds
    tiny = np.float32(size + np.float32(0.5)).view(np.uint32) - np.uint32(0x3F000000)
    found = tiny if bits < np.uint32(0x38800000) else normal
    found = np.uint32(0x7C00) if bits >= np.uint32(0x477FF000) else found  # half a step beyond the largest
    found = np.uint32(0x7E00) if bits > np.uint32(0x7F800000) else found
    return np.uint16(np.float32(value).view(np.uint32) >> np.uint32(16) & np.uint32(0x8000) | found)


@compiled
def float_by_arithmetic(half):
    """The float32 of a float16's bits."""
    word = np.uint32(half)
    m = word & np.uint32(0x7FFF)
    # the exponent moved by 112; those of Inf and NaN by as much again
    held = np.uint32((m << np.uint32(13)) + np.uint32(0x38000000 if m < np.uint32(0x7C00) else 0x70000000))
    tiny = np.float32(np.int32(m)) * np.float32(2.0**-24)
    value = tiny if m < np.uint32(0x400) else held.view(np.float32)
    return -value if word >= np.uint32(0x8000) else value


#: whether the processor has instructions for both
CONVERTS = bool(get_host_cpu_features().get("f16c")) or platform.machine().lower() in ("aarch64", "arm64")
half_of, float_of = (half_by_processor, float_by_processor) if CONVERTS else (half_by_arithmetic, float_by_arithmetic)
