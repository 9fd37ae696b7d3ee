"""The loops of ``numba/memory.py``. Arguments: float32 vectors, or of 8 bits; indices as int32 or int64."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from hvdcompress.ops.numba._kernels.compiling import compiled


@intrinsic
def floats_at(context: Any, address: Any) -> Any:
    """A pointer to the float32 at an address, which ``numba.carray`` makes an array of."""

    def written(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.PointerType(ir.FloatType()))

    return types.CPointer(types.float32)(types.int64), written


@compiled
def check_places(index, size):
    """Whatever came over the wire, memory outside of a vector of this size is neither read nor written.

    The loops that follow need not look at each index, which takes half of their time.

    Raises:
        IndexError: A place is outside.
    """
    outside = False
    for j in range(index.size):
        outside |= (index[j] < 0) | (index[j] >= size)
    if outside:
        raise IndexError("an index is outside of the tensor")


@compiled
def take(x, index, out):
    check_places(index, x.size)
    for j in range(index.size):
        out[j] = x[np.uint64(index[j])]


@compiled
def take_by_age(table, stamps, now, out):
    for i in range(stamps.size):
        out[i] = table[place_of(now, stamps[i], table.size)]


@compiled
def take_by_age_at(table, stamps, now, index, out):
    check_places(index, stamps.size)
    for j in range(index.size):
        out[j] = table[place_of(now, stamps[np.uint64(index[j])], table.size)]


@compiled
def place_of(now, stamp, size):
    """Where the entry of an element is: ages are taken modulo 2^8."""
    return np.uint64(min(max(np.int64(np.int8(now - stamp)), 1), size) - 1)


@compiled
def set_at(x, index, value):
    check_places(index, x.size)
    for j in range(index.size):
        x[np.uint64(index[j])] = value
