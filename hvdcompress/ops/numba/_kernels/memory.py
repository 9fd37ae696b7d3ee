"""The loops of ``numba/memory.py``. Arguments: float32 vectors, or of 8 bits; indices as int32 or int64."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from hvdcompress.ops.numba._kernels.compiling import compiled

RUNS = 256  #: of more runs, each is gone through in the whole vector at once
STAMPED = 1 << 17  #: elements whose stamps, old and new, stay in a cache


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
def runs_of(index):
    """Where ascending runs of indices, end to end, begin and end."""
    count = 1
    for j in range(1, index.size):
        count += index[j] < index[j - 1]
    begins, ends, run = np.zeros(count, np.int64), np.full(count, index.size), 0
    for j in range(1, index.size):
        if index[j] < index[j - 1]:
            ends[run] = j
            run += 1
            begins[run] = j
    return begins, ends


@compiled
def stamp(table, stamps, now, index, out, found):
    """The indices are several runs, as those of ``write_runs``, and so are gone through in the same way."""
    check_places(index, stamps.size)
    entries = np.empty(256, np.float32)  # by now − stamp, as 8 bits without a sign
    for age in range(256):
        entries[age] = table[place_of(np.int8(age), np.int8(0), table.size)]
    places, ends = runs_of(index)
    step = STAMPED if ends.size <= RUNS else max(stamps.size, 1)
    for first in range(0, stamps.size, step):
        last = min(first + step, stamps.size)
        old, new = stamps[first:last], out[first:last]
        for i in range(new.size):
            new[i] = old[i]
        for run in range(ends.size):
            stop = places[run]
            while stop < ends[run] and index[stop] < last:
                stop += 1
            for j in range(places[run], stop):
                at = np.uint64(index[j])
                found[j] = entries[np.uint8(now - stamps[at])]
                out[at] = now
            places[run] = stop


@compiled
def place_of(now, stamp, size):
    """Where the entry of an element is: ages are taken modulo 2^8."""
    return np.uint64(min(max(np.int64(np.int8(now - stamp)), 1), size) - 1)
