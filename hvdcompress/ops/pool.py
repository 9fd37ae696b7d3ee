"""A memory pool for short-lived arrays, because touching fresh pages costs more than writing to used ones.

The operating system hands out memory page by page, clears each page on first touch, and takes it back when a large
array is freed. Without the pool, candidates and decoded indices would touch fresh pages in every step. For each power
of two, the pool keeps as many buffers as were in use at the same time. Buffers are aligned, so that TensorFlow uses an
array without copying it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from hvdcompress.ops.numpy import ALIGNMENT, aligned
from hvdcompress.ops.vectors import NumpyArray as Array

MIN_BYTES = 1 << 17  #: the allocator of the C library reuses smaller arrays itself

_Memory = tuple[Array, int]  # a buffer and its address
_free: defaultdict[int, list[_Memory]] = defaultdict(list)  # size -> free buffers; the last one was used last


class _Lease:
    """Own the memory of an array and of all its views; return it to the pool when the last of them is deleted."""

    __slots__ = ("__array_interface__", "memory")

    def __init__(self, memory: _Memory, size: int, dtype: np.dtype[Any]):
        self.memory = memory
        self.__array_interface__ = {"shape": (size,), "typestr": dtype.str, "data": (memory[1], False), "version": 3}

    # a default argument, because the module's globals may be gone at interpreter exit
    def __del__(self, free: dict[int, list[_Memory]] = _free) -> None:
        free[self.memory[0].size].append(self.memory)


def empty(size: int, dtype: Any) -> Array:
    """Return an uninitialized array like ``numpy.empty``, in reused memory if the pool has a free buffer."""
    dtype = np.dtype(dtype)
    num_bytes = size * dtype.itemsize
    if num_bytes < MIN_BYTES:
        return np.empty(size, dtype)
    room = 1 << (num_bytes - 1).bit_length()
    try:
        memory = _free[room].pop()
    except IndexError:
        buffer = aligned(np.empty(room + ALIGNMENT, np.uint8), room)
        memory = (buffer, buffer.ctypes.data)
    return np.asarray(_Lease(memory, size, dtype))


def clear() -> None:
    """Return all free buffers to the operating system."""
    _free.clear()
