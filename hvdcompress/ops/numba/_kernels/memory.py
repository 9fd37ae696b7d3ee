"""Kernels of ``numba/memory.py``. Vectors are float32 or int8, indices int32 or int64."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from hvdcompress.ops.numba._kernels.compiling import compiled
from hvdcompress.ops.numba._kernels.flags import lowest

RUNS = 256  #: with more runs than this, kernels process run by run instead of block by block
STAMPED = 1 << 17  #: elements whose old and new stamps stay in the cache


@intrinsic
def floats_at(context: Any, address: Any) -> Any:
    """Return a pointer to the float32 at an address. ``numba.carray`` makes an array of it."""

    def written(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.PointerType(ir.FloatType()))

    return types.CPointer(types.float32)(types.int64), written


@compiled
def check_indices(index, size):
    """Check that all indices are in [0, size), because they may come over the network.

    A separate loop, because checking each index in the loops that follow would double their time.

    Raises:
        IndexError: An index is outside of the vector.
    """
    outside = False
    for j in range(index.size):
        outside |= (index[j] < 0) | (index[j] >= size)
    if outside:
        raise IndexError("an index is outside of the tensor")


@compiled
def take(x, index, out):
    check_indices(index, x.size)
    for j in range(index.size):
        out[j] = x[np.uint64(index[j])]


@compiled
def distinct(index, size, words, out):
    """Write the different indices to ``out``, ascending, and return their number. ``words`` has a bit per element."""
    check_indices(index, size)
    words[:] = 0
    for j in range(index.size):
        at = np.uint64(index[j])
        words[at >> np.uint64(6)] |= np.uint64(1) << (at & np.uint64(63))
    found = 0
    for number in range(words.size):
        bits = words[number]
        while bits:
            out[found] = 64 * number + lowest(bits)
            found += 1
            bits &= bits - np.uint64(1)
    return found


@compiled
def runs_of(index):
    """Return the starts and the ends of the ascending runs that the indices consist of."""
    count = 1
    for j in range(1, index.size):
        count += index[j] < index[j - 1]
    begins = np.zeros(count, np.int64)
    ends = np.full(count, index.size)
    run = 0
    for j in range(1, index.size):
        if index[j] < index[j - 1]:
            ends[run] = j
            run += 1
            begins[run] = j
    return begins, ends


@compiled
def stamp(stamps, now, index, out, ages):
    """Set ``ages`` to those of the elements at ``index``, and out = stamps with ``now`` at ``index``.

    As in ``write_runs``, all runs of indices are processed in one block of the vector before the next block.
    """
    check_indices(index, stamps.size)
    cursors, ends = runs_of(index)
    step = STAMPED if ends.size <= RUNS else max(stamps.size, 1)
    for first in range(0, stamps.size, step):
        last = min(first + step, stamps.size)
        old = stamps[first:last]
        new = out[first:last]
        for i in range(new.size):
            new[i] = old[i]
        for run in range(ends.size):
            stop = cursors[run]
            while stop < ends[run] and index[stop] < last:
                stop += 1
            for j in range(cursors[run], stop):
                at = np.uint64(index[j])
                ages[j] = np.int8(now - stamps[at])
                out[at] = now
            cursors[run] = stop
