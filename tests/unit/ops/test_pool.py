"""Memory that is used again never belongs to two arrays at once."""

from __future__ import annotations

import threading

import numpy as np
import pytest

pytest.importorskip("numba")

from hvdcompress.ops import pool

MANY = pool.MIN_BYTES


def address(array: np.ndarray) -> int:
    return array.ctypes.data


def test_memory_of_an_array_that_is_gone_is_used_again() -> None:
    first = pool.empty(MANY, np.float32)
    place = address(first)
    del first
    again = pool.empty(MANY - 1, np.float32)
    assert address(again) == place and again.shape == (MANY - 1,) and again.dtype == np.float32
    again[:] = 1.0


def test_memory_in_use_outlives_clearing() -> None:
    array = pool.empty(MANY, np.float64)
    array[:] = 3.0
    pool.clear()
    others = [pool.empty(MANY, np.float64) for _ in range(3)]
    for other in others:
        other[:] = 4.0
    assert (array == 3.0).all()


@pytest.mark.parametrize("keep", [lambda x: x, lambda x: x[5:9], lambda x: x.view(np.int32)[::2], memoryview])
def test_memory_that_is_referred_to_is_not(keep) -> None:
    first = pool.empty(MANY, np.float32)
    start, stop = address(first), address(first) + first.nbytes
    part = keep(first)
    del first
    other = pool.empty(MANY, np.float32)
    assert not start <= address(other) < stop
    del part


def test_little_memory_is_the_allocators() -> None:
    assert pool.empty(8, np.int64).flags.owndata and not pool.empty(MANY, np.int64).flags.owndata


def test_threads_never_share_memory() -> None:
    wrong = []

    def work(number: int) -> None:
        for _ in range(300):
            array = pool.empty(MANY, np.int32)
            array[:] = number
            if (array != number).any():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
