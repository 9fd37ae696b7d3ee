"""The loopback: each rank is a thread, and the threads meet in each step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hvdcompress.engine.saving import checkpoint
from hvdcompress.engine.telemetry.reports import describe
from hvdcompress.ops.numpy import ops as reference
from hvdcompress.plan import plan_of
from hvdcompress.testing import Trial
from tests.ranks.drivers.base import Arrays, Counter, Driver, Handle, Shapes

SECONDS = 100


class Meeting:
    """A meeting point of the threads of all ranks."""

    def __init__(self, world_size: int):
        self.barrier = threading.Barrier(world_size, timeout=SECONDS)
        self.values: list[Any] = [None] * world_size
        self.result: Any = None
        self.error: BaseException | None = None

    def together(self, rank: int, value: Any, act: Callable[[list[Any]], Any]) -> Any:
        """Call ``act`` once with the values of all ranks; every rank gets the result, or the error."""
        self.values[rank] = value
        if self.barrier.wait() == 0:
            self.result = self.error = None
            try:
                self.result = act(list(self.values))
            except BaseException as error:
                self.error = error
        self.barrier.wait()
        if self.error is not None:
            raise self.error
        return self.result


class LoopbackHandle(Handle):
    def __init__(self, driver: LoopbackDriver, net: Trial, shapes: Shapes, dtype: str, op: str):
        self.driver, self.compressor, self.shapes, self.dtype, self.op = driver, net, shapes, dtype, op

    def reduce(self, gradients: Arrays) -> Arrays:
        given = {n: g if g.dtype.kind != "f" else g.astype(self.dtype) for n, g in gradients.items()}
        act = lambda everyone: self.compressor.allreduce(everyone, op=self.op)  # noqa: E731
        return self.driver.together(given, act)[self.driver.rank]

    def overhead(self, steps: int) -> dict[str, int]:
        return {}

    def sent(self) -> dict[str, int]:
        tensors = self.compressor.ledger.tensors(self.driver.rank)
        return {name: entry.sent for name, entry in tensors.items() if entry.sent}

    def bytes_sent(self) -> int:
        return self.compressor.ledger.bytes_sent(self.driver.rank)

    def bytes_inside_node(self) -> int:
        return self.compressor.ledger.bytes_inside_node(self.driver.rank)

    def counters(self) -> dict[str, int]:
        return self.compressor.ledger.counters(self.driver.rank)

    def residual(self, name: str) -> np.ndarray:
        return self.compressor.residual(name, self.driver.rank)

    def discard(self) -> None:
        self.compressor.ranks[self.driver.rank].discard()

    @contextmanager
    def paused(self) -> Iterator[None]:
        rank = self.compressor.ranks[self.driver.rank]
        rank.paused = True
        yield
        rank.paused = False

    def adapted(self, buffers: Arrays, gradients: Arrays, momentum: float) -> Any:
        return self.compressor.adapted(buffers, gradients, momentum=momentum, rank=self.driver.rank)

    def state(self) -> dict[str, Any]:
        return self.compressor.saved()[self.driver.rank]

    def load_state(self, saved: Mapping[str, Any]) -> None:
        rank = self.compressor.ranks[self.driver.rank]
        rank.load_state_dict(saved, partial(rank.group, self.driver.specs(self.shapes), None, {}))

    def save(self, folder: Path) -> None:
        checkpoint.save(self.state(), folder)

    def load(self, folder: Path) -> None:
        self.load_state(checkpoint.load(folder, self.driver.rank, self.driver.world_size, self.driver.nodes))

    def describe(self) -> str:
        return describe(self.compressor.plan.buckets(self.driver.specs(self.shapes)))

    def summary(self) -> str:
        return self.compressor.summary(self.driver.rank)

    def openmetrics(self, **labels: str) -> str:
        return self.compressor.openmetrics(self.driver.rank, **labels)

    def log_to(self, writer: Any, step: int) -> None:
        self.compressor.log_to(writer, step, self.driver.rank)


class LoopbackDriver(Driver):
    name = "loopback"
    recovers = shared = exact = sums_in_order = True  # type: ignore[assignment]

    def __init__(self, rank: int, world_size: int, num_nodes: int, folder: Path, meeting: Meeting):
        self.rank, self.world_size, self.num_nodes = rank, world_size, num_nodes
        self.folder, self.meeting = folder, meeting
        self._made: list[LoopbackHandle] = []

    def together(self, value: Any, act: Callable[[list[Any]], Any]) -> Any:
        return self.meeting.together(self.rank, value, act)

    def make(self, method, settings, shapes, *, dtype="float32", op="average", loss_scale=1.0) -> LoopbackHandle:
        plan = plan_of(method, **self.placed(settings, method))
        net = self.together(
            (plan, loss_scale), lambda everyone: Trial(everyone[0][0], self.world_size, loss_scale=everyone[0][1])
        )
        self._made.append(LoopbackHandle(self, net, shapes, dtype, op))
        return self._made[-1]

    def gather(self, value: Any) -> list[Any]:
        return self.together(value, lambda everyone: everyone)

    def yardstick(self, method, settings, world_size=None) -> Trial:
        """Return the loopback with the reference array ops, whose results are the same bits."""
        settings = self.placed(settings) if world_size in (None, self.world_size) else settings
        return Trial(plan_of(method, **settings), world_size or self.world_size, ops=reference)

    @contextmanager
    def counting(self) -> Iterator[Counter]:
        first, counter = len(self._made), Counter()
        yield counter
        for handle in self._made[first:] if not self.nodes else ():  # collectives are counted by node, not by rank
            counter.num_bytes += sum(one.num_bytes[self.rank] for one in handle.compressor.log)


def in_threads(world_size: int, num_nodes: int, folder: Path, check: Callable[[LoopbackDriver], None]) -> None:
    """Run a check in a thread for each rank, and raise the first error. ``num_nodes``: 0 for one level."""
    meeting, errors = Meeting(world_size), [None] * world_size

    def run(rank: int) -> None:
        try:
            check(LoopbackDriver(rank, world_size, num_nodes, folder, meeting))
        except BaseException as error:
            errors[rank] = error  # type: ignore[call-overload]
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    found = [error for error in errors if error is not None]
    for error in sorted(found, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
