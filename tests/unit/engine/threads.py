"""A transport among threads of one process, by order or by name: for tests of the engine alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from hvdcompress.engine import lockstep
from hvdcompress.engine.transport import Request


class Medium:
    """What connects the threads. ``requests``: every collective that was carried out, by its key."""

    def __init__(self, world_size: int, ordered: bool):
        self.world_size, self.ordered = world_size, ordered
        self.requests: dict[Any, list[Request]] = {}
        self.results: dict[Any, list[Any]] = {}
        self._asked: dict[Any, dict[int, Request]] = {}
        self._there = threading.Condition()

    def start(self, key: Any, rank: int, request: Request) -> None:
        with self._there:
            asked = self._asked.setdefault(key, {})
            asked[rank] = request
            if len(asked) == self.world_size:
                self.requests[key] = [asked[r] for r in range(self.world_size)]
                self.results[key] = lockstep.carry_out(self.requests[key])
                self._there.notify_all()

    def wait(self, key: Any, seconds: float) -> bool:
        with self._there:
            return self._there.wait_for(lambda: key in self.results, seconds)


class ThreadTransport:
    """One thread's end of it; collectives are matched by their number, or by their name."""

    native_broadcast = False

    def __init__(self, rank: int, medium: Medium):
        self.rank, self.world_size, self.medium = rank, medium.world_size, medium
        self.ordered, self.variable_lengths = medium.ordered, not medium.ordered
        self.names: list[str] = []

    def start(self, name: str, request: Request) -> Any:
        self.names.append(name)
        key = len(self.names) if self.ordered else (name, self.names.count(name))
        self.medium.start(key, self.rank, request)
        return key

    def ready(self, handle: Any) -> bool:
        return handle in self.medium.results

    def wait(self, handle: Any) -> Any:
        assert self.medium.wait(handle, 20), f"rank {self.rank} waited in vain for {handle}"
        return self.medium.results[handle][self.rank]

    def idle(self, handle: Any) -> None:
        self.medium.wait(handle, 0.001)


def run(world_size: int, ordered: bool, program: Callable[[ThreadTransport], Any]) -> tuple[list[Any], Medium]:
    """Run a program on every rank; what each returned or raised, and the medium."""
    medium, found = Medium(world_size, ordered), [None] * world_size

    def one(rank: int) -> None:
        try:
            found[rank] = program(ThreadTransport(rank, medium))
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a rank hangs"
    return found, medium
