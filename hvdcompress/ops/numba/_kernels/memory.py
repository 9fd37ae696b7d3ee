"""The loops of ``numba/memory.py``. Arguments: float32 vectors; indices as int32 or int64."""

from __future__ import annotations

from typing import Any

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
def take(x, index, out):
    for j in range(index.size):
        i = index[j]
        if i < 0 or i >= x.size:  # never read out of bounds
            raise IndexError("an index is outside of the tensor")
        out[j] = x[i]
