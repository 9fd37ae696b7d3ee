"""This rank's cores: long kernels work on ranges of a vector side by side. Results do not depend on their number."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from math import ceil
from typing import TypeVar

T = TypeVar("T")

THREADS = "HVDCOMPRESS_THREADS"  #: the environment variable with the number of threads
RANGE = 1 << 20  #: elements of a range, at least; fewer are done sooner than a thread is woken
#: variables in which launchers tell how many ranks run on this host
LOCAL_RANKS = ("HOROVOD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS")


@cache
def count() -> int:
    """Return how many threads kernels may use: ``HVDCOMPRESS_THREADS``, or this rank's share of the host's cores.

    Raises:
        ValueError: the variable is not a positive number.
    """
    given = os.environ.get(THREADS, "")
    if given:
        if not given.isdecimal() or int(given) < 1:
            raise ValueError(f"{THREADS}={given!r}: give a number of threads, 1 or more")
        return int(given)
    ranks = next((int(os.environ[name]) for name in LOCAL_RANKS if os.environ.get(name, "").isdecimal()), 1)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // max(ranks, 1))


@cache
def _pool(process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count() - 1, thread_name_prefix="hvdcompress")


def in_ranges(work: Callable[[int, int], T], n: int, align: int = 1) -> list[T]:
    """Do a kernel's work on ranges of a vector, on as many threads as :func:`count` allows.

    Args:
        work: (start, stop) -> the result of these elements. Ranges do not overlap and may run at the same time, so
            it calls kernels only, which release the interpreter's lock.
        n: the vector's number of elements.
        align: every range but the last has a multiple of so many elements.

    Returns:
        The results, in the order of the ranges; one of (0, n) for few elements, or one thread.
    """
    threads = min(count(), max(1, n // RANGE))
    if threads == 1:
        return [work(0, n)]
    step = align * ceil(n / threads / align)
    ranges = [(start, min(start + step, n)) for start in range(0, n, step)]
    others = [_pool(os.getpid()).submit(work, *each) for each in ranges[1:]]
    try:
        first = work(*ranges[0])
    finally:  # a kernel that still writes must not meet whatever follows an error
        done = [other.exception() for other in others]
    for error in done:
        if error:
            raise error
    return [first, *(other.result() for other in others)]
