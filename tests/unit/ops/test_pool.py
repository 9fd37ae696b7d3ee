"""Tests of ``ops/pool.py``: memory that is used again never belongs to two arrays at once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba")

from hvdcompress.ops import pool

SIZE = pool.MIN_BYTES


def test_memory_of_a_deleted_array_is_used_again() -> None:
    first = pool.empty(SIZE, np.float32)
    address = first.ctypes.data
    del first
    again = pool.empty(SIZE - 1, np.float32)
    assert again.ctypes.data == address and again.shape == (SIZE - 1,) and again.dtype == np.float32
    assert pool.empty(8, np.int64).flags.owndata  # small arrays do not come from the pool


def test_memory_in_use_outlives_clearing() -> None:
    array = pool.empty(SIZE, np.float64)
    array[:] = 3.0
    pool.clear()
    for other in [pool.empty(SIZE, np.float64) for _ in range(3)]:
        other[:] = 4.0
    assert (array == 3.0).all()


@pytest.mark.parametrize("view", [lambda x: x[5:9], lambda x: x.view(np.int32)[::2], memoryview])
def test_memory_with_a_view_is_not_used_again(view: Callable[[np.ndarray], Any]) -> None:
    first = pool.empty(SIZE, np.float32)
    start, stop = first.ctypes.data, first.ctypes.data + first.nbytes
    part = view(first)
    del first
    assert not start <= pool.empty(SIZE, np.float32).ctypes.data < stop
    del part


def test_threads_never_share_memory() -> None:
    def is_alone(number: int) -> bool:
        array = pool.empty(SIZE, np.int32)
        array[:] = number
        return bool((array == number).all())

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(is_alone, range(1200)))
