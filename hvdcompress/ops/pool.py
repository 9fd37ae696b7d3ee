"""Memory for results that live briefly: it is kept and used again, since fresh pages cost more than what is in them.

The system hands out memory page by page, each cleared when it is first touched, and takes it back when a large array is
freed: a step's candidates and decoded indices would meet fresh pages in every step. Kept is as much as was in use at
once, of each power of two. It is aligned, so that TensorFlow takes an array over as it is, and does not copy it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from hvdcompress.ops.numpy.memory import ALIGNMENT, aligned
from hvdcompress.ops.vectors import NumpyArray as Array

LEAST = 1 << 17  #: bytes; the memory of less is kept by the system's allocator

_Memory = tuple[Array, int]  # a buffer, and where it begins
_free: defaultdict[int, list[_Memory]] = defaultdict(list)  # by their size; the last is the warmest


class _Lease:
    """The owner of an array and of all its parts: it gives the memory back when the last of them is gone."""

    __slots__ = ("__array_interface__", "memory")

    def __init__(self, memory: _Memory, size: int, dtype: np.dtype[Any]):
        self.memory = memory
        self.__array_interface__ = {"shape": (size,), "typestr": dtype.str, "data": (memory[1], False), "version": 3}

    def __del__(self, free: dict[int, list[_Memory]] = _free) -> None:  # a module's names may be gone at the end
        free[self.memory[0].size].append(self.memory)


def empty(size: int, dtype: Any) -> Array:
    """Return what ``numpy.empty`` does, in memory that was in use before if there is any."""
    dtype = np.dtype(dtype)
    num_bytes = size * dtype.itemsize
    if num_bytes < LEAST:
        return np.empty(size, dtype)
    room = 1 << (num_bytes - 1).bit_length()
    try:
        memory = _free[room].pop()
    except IndexError:
        buffer = aligned(np.empty(room + ALIGNMENT, np.uint8), room)
        memory = buffer, buffer.ctypes.data
    return np.asarray(_Lease(memory, size, dtype))


def clear() -> None:
    """Give back all memory that is not in use."""
    _free.clear()
