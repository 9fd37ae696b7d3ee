"""Tests of ``ops/numba/threads.py``: kernels on several threads return the bytes that one thread returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import Barrier

import numpy as np
import pytest

from hvdcompress import launchers
from hvdcompress.ops.numba import ops, threads
from tests.unit.ops.calls import CALLS, TO_ROUNDING
from tests.unit.ops.comparing import Put, get, own_ops

SetCount = Callable[[int], None]


@pytest.fixture
def set_count(monkeypatch: pytest.MonkeyPatch) -> Iterator[SetCount]:
    """Sets the number of threads for vectors of 4096 elements or more."""
    monkeypatch.setattr(threads, "MIN_RANGE", 4096)

    def use(number: int) -> None:
        threads._pool.cache_clear()
        monkeypatch.setattr(threads, "count", lambda: number)

    yield use
    threads._pool.cache_clear()


#: ops whose threads start at multiples of 65536 elements
COARSE = {"accumulate", "accumulate_parts"}


@pytest.mark.parametrize(
    "op,n",
    [
        *((op, 3 * 4096 + 77) for op in sorted(set(own_ops("numba")) - TO_ROUNDING - COARSE)),
        *((op, 2 * 65536 + 1) for op in sorted(COARSE)),
    ],
)
def test_results_do_not_depend_on_the_number_of_threads(set_count: SetCount, op: str, n: int) -> None:
    x, r = np.random.default_rng(n).standard_t(3, (2, n)).astype(np.float32)
    results = []
    for number in (1, 3):
        set_count(number)
        with np.errstate(all="ignore"):
            results.append([get(call(ops, Put(ops), x.copy(), r.copy())) for call in CALLS[op]])
    assert results[0] == results[1]


@pytest.mark.parametrize("n,align", [(4096 * 9, 1), (4096 * 9 + 5, 1000), (4096 * 2, 1 << 20), (0, 8)])
def test_ranges_are_complete_and_aligned(set_count: SetCount, n: int, align: int) -> None:
    set_count(3)
    ranges = threads.in_ranges(lambda start, stop: (start, stop), n, align)
    assert [start for start, _ in ranges[1:]] == [stop for _, stop in ranges[:-1]]
    assert (ranges[0][0], ranges[-1][1]) == (0, n) and all(start % align == 0 for start, _ in ranges)
    assert 1 <= len(ranges) <= 3


def test_ranges_run_at_the_same_time(set_count: SetCount) -> None:
    set_count(3)
    barrier = Barrier(3, timeout=20)
    assert len(threads.in_ranges(lambda *_: barrier.wait(), 4096 * 3)) == 3


def test_an_error_waits_for_the_other_ranges(set_count: SetCount) -> None:
    set_count(2)
    ended = []

    def work(start: int, stop: int) -> None:
        if start == 0:
            raise ValueError("broken")
        ended.append(stop)

    with pytest.raises(ValueError, match="broken"):
        threads.in_ranges(work, 8192)
    assert ended == [8192]


@pytest.mark.parametrize(
    "variable,value,expected",
    [
        ("HOROVOD_LOCAL_SIZE", "4", 2),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "16", 1),
        ("LOCAL_WORLD_SIZE", "0", 9),
        (threads.THREADS, "5", 5),
        *((threads.THREADS, wrong, None) for wrong in ("0", "-1", "two", "1.5")),
    ],
)
def test_default_count_is_the_share_of_the_rank(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, expected: int | None
) -> None:
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: set(range(9)), raising=False)
    for name in (threads.THREADS, *(each.local_size for each in launchers.LAUNCHERS)):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, value)
    if expected is None:
        with pytest.raises(ValueError, match="HVDCOMPRESS_THREADS"):
            threads.count.__wrapped__()
    else:
        assert threads.count.__wrapped__() == expected
