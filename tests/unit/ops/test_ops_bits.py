"""Tests of ``bits.py`` in the backends; ``test_ops.py`` compares its ops with the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.unit.ops.comparing import Put, get, host


@pytest.mark.parametrize("length", [0, 1, 5])
@pytest.mark.parametrize("op", ["unpack_bits", "find_bits", "unpack_signs", "dequantize"])
@pytest.mark.parametrize("width", [2, 5, 8])
def test_short_buffers_are_read_as_if_zeros_followed(backend: Any, op: str, width: int, length: int) -> None:
    """numpy's ``unpackbits`` of an empty buffer would return memory that nobody has written."""
    put, count = Put(backend), 100
    short = np.full(length, 0b10110101, np.uint8)
    arguments: tuple[Any, ...] = {
        "unpack_bits": (width, count),
        "find_bits": (count * width,),
        "unpack_signs": (put(np.float32([2])), count * width),
        "dequantize": (put(np.float32([2])), count, width, count),
    }[op]
    stale = np.full(count * width, 0xFF, np.uint8)  # a new array of this size may reuse its memory
    del stale
    found = host(getattr(backend, op)(put(short), *arguments))
    assert get(found) == get(getattr(backend, op)(put(np.append(short, np.zeros(count, np.uint8))), *arguments))
    assert length or not (found < 0).any()
