"""Kernels of ``numba/memory.py``. Vectors are float32 or int8, indices int32 or int64."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from hvdcompress.ops.numba._kernels.compiling import compiled
from hvdcompress.ops.numba._kernels.flags import lowest

RUNS = 256  #: with more runs than this, kernels process run by run instead of block by block
STAMPED = 1 << 16  #: elements whose old and new stamps stay in the cache
STREAMED = 16  #: float32 in a line of the cache


@intrinsic
def floats_at(context: Any, address: Any) -> Any:
    """Return a pointer to the float32 at an address. ``numba.carray`` makes an array of it."""

    def written(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.PointerType(ir.FloatType()))

    return types.CPointer(types.float32)(types.int64), written


@intrinsic
def _store_past(context: Any, target: Any, source: Any) -> Any:
    """Copy STREAMED float32 between addresses, past the cache: without reading the line that is overwritten."""

    def written(compiler: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointers = [
            builder.inttoptr(each, ir.PointerType(ir.VectorType(ir.FloatType(), STREAMED))) for each in arguments
        ]
        store = builder.store(builder.load(pointers[1], align=4), pointers[0], align=4 * STREAMED)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return compiler.get_dummy_value()

    return types.void(types.int64, types.int64), written


@compiled
def stream(target, source):
    """Copy ``source`` to the address ``target``, which has room for as many float32, past the cache."""
    out = carray(floats_at(target), source.shape)
    head = min(-(target // 4) % STREAMED, source.size)
    body = head + (source.size - head) // STREAMED * STREAMED
    out[:head] = source[:head]
    for i in range(head, body, STREAMED):
        _store_past(target + 4 * i, source.ctypes.data + 4 * i)
    out[body:] = source[body:]


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

    Return False, and do nothing, if the indices do not ascend.
    """
    check_indices(index, stamps.size)
    ascends = True
    for j in range(1, index.size):
        ascends &= index[j] >= index[j - 1]
    if not ascends:
        return False
    j = 0
    for first in range(0, stamps.size, STAMPED):
        last = min(first + STAMPED, stamps.size)
        old = stamps[first:last]
        new = out[first:last]
        for i in range(new.size):
            new[i] = old[i]
        begin = j
        while j < index.size and index[j] < last:
            j += 1
        for k in range(begin, j):
            at = np.uint64(index[k])
            ages[k] = np.int8(now - stamps[at])
            out[at] = now
    return True


@compiled
def part_of(parts, spans, number, index):
    """Return a part of a vector, where it starts, and the range of the ascending indices that are in it."""
    start, stop = spans[number]
    x = carray(floats_at(parts[number]), (stop - start,))
    return x, start, range(np.searchsorted(index, start), np.searchsorted(index, stop))


@compiled
def take_parts(parts, spans, index, table, entries, values):
    """Set ``values`` to the elements at ``index`` of a vector whose parts have these addresses and spans [parts, 2].

    The values are multiplied by table[entries]; not if the table is empty.
    """
    check_indices(entries, table.size)
    for number in range(parts.size):
        x, start, inside = part_of(parts, spans, number, index)
        for j in inside:
            at = np.uint64(index[j] - start)
            if at < np.uint64(x.size):
                values[j] = x[at] * table[np.uint8(entries[j])] if table.size else x[at]


@compiled
def add_parts(parts, spans, index, values, factor):
    """Add factor·values to the elements at ``index`` of a vector in parts, as for ``take_parts``."""
    for number in range(parts.size):
        x, start, inside = part_of(parts, spans, number, index)
        for j in inside:
            at = np.uint64(index[j] - start)
            if at < np.uint64(x.size):
                x[at] += factor * values[j]


@compiled
def add_whole_parts(parts, spans, values, factor):
    """Add factor times the parts at the addresses ``values`` to those at the addresses ``parts``."""
    for part in range(parts.size):
        size = spans[part, 1] - spans[part, 0]
        x = carray(floats_at(parts[part]), (size,))
        y = carray(floats_at(values[part]), (size,))
        for i in range(size):
            x[i] += factor * y[i]
