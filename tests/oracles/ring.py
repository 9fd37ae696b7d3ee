"""The ring all-reduce of ``experiments.ring`` with all ranks in threads of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

from experiments.ring.algorithm import RingSum, ring
from experiments.ring.codecs import Array, SegmentCodec

PATIENCE = 60  #: seconds that a simulated rank waits for its predecessor, which may have failed


def simulate(xs: Sequence[Array], codecs: Sequence[SegmentCodec]) -> list[RingSum]:
    """Run all ranks in threads of this process: the vector and the codec of each rank -> the result of each rank."""
    p = len(xs)
    queues: list[SimpleQueue[Array]] = [SimpleQueue() for _ in xs]

    def run(rank: int) -> RingSum:
        def exchange(payload: Array, num_bytes: int) -> Callable[[], Array]:
            queues[(rank + 1) % p].put(payload)
            return lambda: queues[rank].get(timeout=PATIENCE)

        return ring(xs[rank], codecs[rank], rank, p, exchange)

    with ThreadPoolExecutor(p) as pool:
        return list(pool.map(run, range(p)))
