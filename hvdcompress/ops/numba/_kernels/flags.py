"""Flags, which loops write as bytes of 0 and 1, as bits of words: 64 of them are looked at in one step.

Two vector instructions make a word of 64 flags. Numba does not know them, and LLVM does: what is intrinsic here is
written in LLVM's terms, which it translates for any processor.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from hvdcompress.ops.numba._kernels.compiling import compiled

WORD = 64  #: flags of a word


@intrinsic
def word(context: Any, flag: Any, start: Any) -> Any:
    """Return flags ``start`` to ``start`` + 64 as a uint64, the first one as its lowest bit."""

    def written(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = target.make_array(signature.args[0])(target, builder, arguments[0])
        bytes_ = ir.VectorType(ir.IntType(8), WORD)
        place = builder.bitcast(builder.gep(array.data, [arguments[1]]), bytes_.as_pointer())
        is_set = builder.icmp_unsigned("!=", builder.load(place, align=1), ir.Constant(bytes_, [0] * WORD))
        return builder.bitcast(is_set, ir.IntType(WORD))

    return types.uint64(flag, types.intp), written


@intrinsic
def lowest(context: Any, bits: Any) -> Any:
    """Return which is the lowest bit that is set, of a uint64 that is not 0."""

    def written(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), written


@compiled
def places(flag, out):
    """Where flags are set, ascending; ``flag`` and ``out`` are of one length, a multiple of 64. Returns how many."""
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
    """Note the elements of ``x`` whose flags are set after the ``found`` that are there, as far as there is room.

    Args:
        flag: a multiple of 64 in length; 0 beyond the end of ``x``.
        x: the elements.
        first: the index of the first one.
        index: the indices that are noted.
        values: the elements that are noted.
        found: how many there are.

    Returns:
        How many there are now.
    """
    for start in range(0, flag.size, WORD):
        bits = word(flag, start)
        while bits and found < index.size:
            i = start + lowest(bits)
            index[found], values[found] = first + i, x[i]
            found += 1
            bits &= bits - np.uint64(1)
    return found


@compiled
def pack(flag, out):
    """Write flags as bits, 8 in a byte; ``flag`` is a multiple of 64 in length, and 0 beyond the end of ``out``."""
    for start in range(0, 8 * out.size, WORD):
        bits, eight = word(flag, start), out[start // 8 : start // 8 + 8]
        for j in range(eight.size):
            eight[j] = bits >> np.uint64(8 * j) & np.uint64(0xFF)
