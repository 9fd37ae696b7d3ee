"""Arrays that TensorFlow takes over as they are, and that are used again once it has let go of them."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from hvdcompress.ops.numpy import memory

Array = np.ndarray[Any, Any]


class Arrays:
    """Memory for what pieces of Python return to a graph.

    TensorFlow copies what a piece returns into fresh memory, unless it is aligned; then a tensor keeps a reference
    to it. So memory of which nobody but this object has a reference is free, and is handed out first.
    """

    def __init__(self) -> None:
        self._made: dict[int, list[Array]] = {}  # bytes that own their memory, by their number
        new = [np.empty(0)]
        self._free = _references(new)[0]  # how many references there are to what only a list holds

    def take(self, size: int, dtype: Any) -> Array:
        """An array [size] that nobody uses; its contents are undefined."""
        num_bytes = size * np.dtype(dtype).itemsize
        made = self._made.setdefault(num_bytes, [])
        for place, references in enumerate(_references(made)):
            if references == self._free:
                return memory.aligned(made[place], num_bytes).view(dtype)
        made.append(np.empty(num_bytes + memory.ALIGNMENT, np.uint8))
        return memory.aligned(made[-1], num_bytes).view(dtype)


def _references(arrays: list[Array]) -> list[int]:
    """How many references there are to each; a view of an array holds one."""
    return [sys.getrefcount(array) for array in arrays]
