"""Memory for results that live briefly: it is kept and used again, since fresh pages cost more than what is in them.

The system hands out memory page by page, each cleared when it is first touched, and takes it back when a large array is
freed: a step's candidates and decoded indices would meet fresh pages in every step. A buffer is free again when no
array refers to it. As many are kept as were in use at once, of each power of two.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdcompress.ops.vectors import NumpyArray as Array

LEAST = 1 << 15  #: bytes; the memory of less is kept by the system's allocator

_buffers: dict[int, list[Array]] = {}  # by the logarithm of their size
_lock = threading.Lock()


def _first(buffers: Sequence[Array], references: int) -> Array | None:
    """Return the first buffer that has so many references, or None."""
    return next((buffer for buffer in buffers if sys.getrefcount(buffer) == references), None)


#: What a buffer has that only its list refers to: this depends on the Python version.
_FREE = next(references for references in range(10) if _first([np.empty(0)], references) is not None)


def empty(size: int, dtype: Any) -> Array:
    """Return what ``numpy.empty`` does, in memory that was in use before if there is any."""
    num_bytes = size * np.dtype(dtype).itemsize
    if num_bytes < LEAST:
        return np.empty(size, dtype)
    with _lock:  # until the new array refers to it, a buffer looks free
        buffers = _buffers.setdefault((num_bytes - 1).bit_length(), [])
        found = _first(buffers, _FREE)
        if found is None:
            found = np.empty(1 << (num_bytes - 1).bit_length(), np.uint8)
            buffers.append(found)
        return found[:num_bytes].view(dtype)


def num_bytes() -> int:
    """Return the bytes of all buffers, of which only those are in memory that were written once."""
    return sum(buffer.nbytes for buffers in _buffers.values() for buffer in buffers)
