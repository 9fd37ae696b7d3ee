"""Memory for results that live briefly: it is kept and used again, since fresh pages cost more than what is in them.

The system hands out memory page by page, each cleared when it is first touched, and takes it back when a large array is
freed: a step's candidates and decoded indices would meet fresh pages in every step. Kept is as much as was in use at
once, of each power of two.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from hvdcompress.ops.vectors import NumpyArray as Array

LEAST = 1 << 17  #: bytes; the memory of less is kept by the system's allocator

_buffers: list[Array] = []
_free: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)  # by their width; the last is the warmest


class _Lease:
    """The owner of an array and of all its parts: it gives the memory back when the last of them is gone.

    Args:
        place: where a buffer begins, and the logarithm of its size.
        size: elements of the array.
        dtype: their dtype.
    """

    __slots__ = ("__array_interface__", "place")

    def __init__(self, place: tuple[int, int], size: int, dtype: np.dtype[Any]):
        self.place = place
        self.__array_interface__ = {"shape": (size,), "typestr": dtype.str, "data": (place[0], False), "version": 3}

    def __del__(self) -> None:
        _free[self.place[1]].append(self.place)


def empty(size: int, dtype: Any) -> Array:
    """Return what ``numpy.empty`` does, in memory that was in use before if there is any."""
    dtype = np.dtype(dtype)
    num_bytes = size * dtype.itemsize
    if num_bytes < LEAST:
        return np.empty(size, dtype)
    width = (num_bytes - 1).bit_length()
    try:
        place = _free[width].pop()
    except IndexError:
        buffer = np.empty(1 << width, np.uint8)
        _buffers.append(buffer)
        place = buffer.ctypes.data, width
    return np.asarray(_Lease(place, size, dtype))


def num_bytes() -> int:
    """Return how much memory is kept or in use; pages that nothing was written to count, too."""
    return sum(buffer.nbytes for buffer in _buffers)
