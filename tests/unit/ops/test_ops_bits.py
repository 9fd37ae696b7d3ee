"""Tests of ``bits.py`` in the backends; ``test_ops.py`` compares its ops with the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvdcompress.ops.vectors import Codes, quantized_levels
from tests.unit.ops.comparing import Put, get, host


@pytest.mark.parametrize("length", [0, 1, 5])
@pytest.mark.parametrize("op", ["unpack_bits", "find_bits", "dense"])
@pytest.mark.parametrize("width", [2, 5, 8])
def test_short_buffers_are_read_as_if_zeros_followed(backend: Any, op: str, width: int, length: int) -> None:
    """numpy's ``unpackbits`` of an empty buffer would return memory that nobody has written."""
    put, count = Put(backend), 100
    short = np.full(length, 0b10110101, np.uint8)
    norms = put(np.float32([2]))

    def call(buffer: np.ndarray) -> Any:
        if op == "unpack_bits":
            return backend.unpack_bits(put(buffer), width, count)
        if op == "find_bits":
            return backend.find_bits(put(buffer), count * width)
        return backend.dense(Codes(put(buffer), norms, count, quantized_levels(width), width, 0, count))

    stale = np.full(count * width, 0xFF, np.uint8)  # a new array of this size may reuse its memory
    del stale
    found = host(call(short))
    assert get(found) == get(call(np.append(short, np.zeros(count, np.uint8))))
    assert length or not (found < 0).any()
