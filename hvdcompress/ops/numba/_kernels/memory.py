"""The loops of ``numba/memory.py``. Arguments: float32 vectors; indices as int32 or int64."""

from __future__ import annotations

from hvdcompress.ops.numba._kernels.compiling import compiled


@compiled
def take(x, index, out):
    for j in range(index.size):
        i = index[j]
        if i < 0 or i >= x.size:  # never read out of bounds
            raise IndexError("an index is outside of the tensor")
        out[j] = x[i]
