"""Find the set flags in arrays of flags, one byte of 0 or 1 each, 64 at a time.

Two vector instructions turn 64 flags into a uint64. Numba has no function for them, so the intrinsics here are written
in LLVM's intermediate representation, which LLVM compiles for any processor.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from hvdcompress.ops.numba._kernels.compiling import compiled

WORD = 64  #: flags per word


@intrinsic
def word(context: Any, flag: Any, start: Any) -> Any:
    """Return flags ``start`` to ``start`` + 64 as a uint64; the first flag is the lowest bit."""

    def written(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = target.make_array(signature.args[0])(target, builder, arguments[0])
        bytes_ = ir.VectorType(ir.IntType(8), WORD)
        pointer = builder.bitcast(builder.gep(array.data, [arguments[1]]), bytes_.as_pointer())
        is_set = builder.icmp_unsigned("!=", builder.load(pointer, align=1), ir.Constant(bytes_, [0] * WORD))
        return builder.bitcast(is_set, ir.IntType(WORD))

    return types.uint64(flag, types.intp), written


@intrinsic
def lowest(context: Any, bits: Any) -> Any:
    """Return the index of the lowest set bit of a uint64 other than 0."""

    def written(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), written


@compiled
def indices(flag, out):
    """Write the indices of the set flags to ``out``, ascending, and return their number.

    ``flag`` and ``out`` have the same length, a multiple of 64.
    """
    found = 0
    for start in range(0, flag.size, WORD):
        bits = word(flag, start)
        while bits:
            out[found] = start + lowest(bits)
            found += 1
            bits &= bits - np.uint64(1)
    return found


@compiled
def note(flag, x, first, index, values, found):
    """Append the elements of ``x`` whose flags are set to ``index`` and ``values``, while there is room.

    Args:
        flag: Flags of the elements; the length is a multiple of 64, with zeros beyond the end of ``x``.
        x: The elements.
        first: Index of x[0] in the vector.
        index: Receives the indices.
        values: Receives the elements.
        found: Number of entries so far.

    Returns:
        The new number of entries.
    """
    for start in range(0, flag.size, WORD):
        bits = word(flag, start)
        while bits and found < index.size:
            i = start + lowest(bits)
            index[found] = first + i
            values[found] = x[i]
            found += 1
            bits &= bits - np.uint64(1)
    return found
