"""Kernels on several threads: what they give is what one thread gives, to the bit."""

from __future__ import annotations

import importlib
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest

from hvdcompress.ops import numba as ops
from hvdcompress.ops.numba import threads
from tests.unit.ops.comparing import CALLS, Put, get

for file in sorted(Path(__file__).parent.glob("test_ops_*.py")):  # they register the calls
    importlib.import_module(f"tests.unit.ops.{file.stem}")


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets how many threads kernels use, for vectors of 4096 elements and more."""
    monkeypatch.setattr(threads, "MIN_RANGE", 4096)

    def use(number: int) -> None:
        threads._pool.cache_clear()
        monkeypatch.setattr(threads, "count", lambda: number)

    yield use
    threads._pool.cache_clear()


@pytest.mark.parametrize("op", sorted(CALLS))
@pytest.mark.parametrize("n", [2 * 65536 + 1, 3 * 4096 + 77])
def test_results_do_not_depend_on_the_number_of_threads(cores: Any, op: str, n: int) -> None:
    rng = np.random.default_rng(n)
    x, y = (rng.standard_t(3, n).astype(np.float32) for _ in range(2))
    results = []
    for number in (1, 3):
        cores(number)
        results.append([get(call(ops, Put(ops), x.copy(), y.copy())) for call in CALLS[op]])
    assert results[0] == results[1]


def test_ranges_are_whole_and_aligned(cores: Any) -> None:
    cores(3)
    for n, align in ((4096 * 9, 1), (4096 * 9 + 5, 1000), (4096 * 2, 1 << 20), (0, 8)):
        ranges = threads.in_ranges(lambda start, stop: (start, stop), n, align)
        assert [start for start, _ in ranges[1:]] == [stop for _, stop in ranges[:-1]]
        assert (ranges[0][0], ranges[-1][1]) == (0, n) and all(start % align == 0 for start, _ in ranges)
        assert 1 <= len(ranges) <= 3


def test_ranges_run_at_the_same_time(cores: Any) -> None:
    cores(3)
    meeting = Barrier(3, timeout=20)
    assert len(threads.in_ranges(lambda *_: meeting.wait(), 4096 * 3)) == 3


def test_an_error_waits_for_the_other_ranges(cores: Any) -> None:
    cores(2)
    ended = []

    def work(start: int, stop: int) -> None:
        if start == 0:
            raise ValueError("broken")
        ended.append(stop)

    with pytest.raises(ValueError, match="broken"):
        threads.in_ranges(work, 8192)
    assert ended == [8192]


def test_the_default_is_the_ranks_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: set(range(9)), raising=False)
    for name in (threads.THREADS, *threads.LOCAL_RANKS):
        monkeypatch.delenv(name, raising=False)
    for variable, value, expected in (
        ("HOROVOD_LOCAL_SIZE", "4", 2),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "16", 1),
        ("LOCAL_WORLD_SIZE", "0", 9),
        (threads.THREADS, "5", 5),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(variable, value)
            assert threads.count.__wrapped__() == expected, variable


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5"])
def test_a_wrong_number_is_an_error_that_names_the_variable(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(threads.THREADS, value)
    with pytest.raises(ValueError, match="HVDCOMPRESS_THREADS"):
        threads.count.__wrapped__()
