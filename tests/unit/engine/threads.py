"""A transport between threads of one process, which matches collectives by order or by name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hvdcompress.engine import lockstep
from hvdcompress.engine.transport import Request


class Medium:
    """Connects the threads. ``results``: those of every collective, by its key."""

    def __init__(self, world_size: int, ordered: bool):
        self.world_size = world_size
        self.ordered = ordered
        self.results: dict[Any, list[Any]] = {}
        self._arrived: dict[Any, dict[int, Request]] = {}
        self._condition = threading.Condition()

    def start(self, key: Any, rank: int, request: Request) -> None:
        with self._condition:
            arrived = self._arrived.setdefault(key, {})
            arrived[rank] = request
            if len(arrived) == self.world_size:
                self.results[key] = lockstep.carry_out([arrived[r] for r in range(self.world_size)])
                self._condition.notify_all()

    def wait(self, key: Any, seconds: float) -> bool:
        with self._condition:
            return self._condition.wait_for(lambda: key in self.results, seconds)


class ThreadTransport:
    """The transport of one thread. A collective's key is its number, or its name."""

    native_broadcast = False
    shards_sums: tuple[str, ...] = ()

    def __init__(self, rank: int, medium: Medium):
        self.rank = rank
        self.world_size = medium.world_size
        self.medium = medium
        self.ordered = medium.ordered
        self.variable_lengths = not medium.ordered
        self.names: list[str] = []

    def start(self, name: str, request: Request) -> Any:
        self.names.append(name)
        key = len(self.names) if self.ordered else (name, self.names.count(name))
        self.medium.start(key, self.rank, request)
        return key

    def ready(self, handle: Any) -> bool:
        return handle in self.medium.results

    def wait(self, handle: Any) -> Any:
        assert self.medium.wait(handle, 20), f"rank {self.rank}: timed out waiting for {handle}"
        return self.medium.results[handle][self.rank]

    def idle(self, handle: Any) -> None:
        self.medium.wait(handle, 0.001)


def run(world_size: int, ordered: bool, program: Callable[[ThreadTransport], Any]) -> tuple[list[Any], Medium]:
    """Run a program on every rank. Return what each rank returned or raised, and the medium."""
    medium = Medium(world_size, ordered)
    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(program, ThreadTransport(rank, medium)) for rank in range(world_size)]
    return [future.exception() or future.result() for future in futures], medium
