"""Threads for long kernels: each thread works on a range of the vector. Results do not depend on their number."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from math import ceil
from typing import TypeVar

from hvdcompress.launchers import local_size

T = TypeVar("T")

THREADS = "HVDCOMPRESS_THREADS"  #: environment variable: number of threads per rank
MIN_RANGE = 1 << 20  #: minimum number of elements per thread: shorter ranges take less time than waking a thread


@cache
def count() -> int:
    """Return the number of threads for kernels: ``HVDCOMPRESS_THREADS``, or this rank's share of the host's cores.

    Raises:
        ValueError: the variable is not a positive number.
    """
    given = os.environ.get(THREADS, "")
    if given:
        if not given.isdecimal() or int(given) < 1:
            raise ValueError(f"{THREADS} must be a number of threads, 1 or more, not {given!r}")
        return int(given)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // max(local_size(), 1))


@cache
def _pool(process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count() - 1, thread_name_prefix="hvdcompress")


def in_ranges(work: Callable[[int, int], T], n: int, align: int = 1) -> list[T]:
    """Run a kernel on ranges of a vector, on as many threads as :func:`count` allows.

    Args:
        work: (start, stop) -> the result for these elements. Ranges do not overlap. Calls of ``work`` may run at the
            same time, so it should only call kernels, which release the GIL.
        n: Number of elements of the vector.
        align: The length of every range except the last is a multiple of this number.

    Returns:
        The results in the order of the ranges; a single result for (0, n) if one thread is enough.
    """
    threads = min(count(), max(1, n // MIN_RANGE))
    if threads == 1:
        return [work(0, n)]
    step = align * ceil(n / threads / align)
    ranges = [(start, min(start + step, n)) for start in range(0, n, step)]
    others = [_pool(os.getpid()).submit(work, *each) for each in ranges[1:]]
    try:
        first = work(*ranges[0])
    finally:  # wait for all threads, also after an error: their kernels still write to the vector
        errors = [other.exception() for other in others]
    for error in errors:
        if error:
            raise error
    return [first, *(other.result() for other in others)]
