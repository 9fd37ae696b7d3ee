"""From a method's collectives to what is really sent, and back: written once, for every transport.

===========  ===========================================================================
collective         what is sent
===========  ===========================================================================
all-reduce   as it is
all-gather   as it is; before it, where a transport must know lengths that are not
             fixed or not known yet, 8 bytes
all-to-all   as it is
broadcast    as it is, or as an int32 sum to which the other ranks give zeros
===========  ===========================================================================
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import hvdcompress.ops
from hvdcompress.engine.telemetry.observer import Observer, Sent
from hvdcompress.engine.transport import Group, Handle, Request, Transport
from hvdcompress.method import AllGather, AllReduce, AllToAll, Array, Broadcast, Collective
from hvdcompress.ops.spec import Ops
from hvdcompress.parts import wire


def cut(x: Any, lengths: Sequence[int]) -> list[Any]:
    """Consecutive pieces of ``x`` of these lengths, as views.

    Raises:
        RuntimeError: the lengths do not add up to ``len(x)``.
    """
    stops = np.cumsum(lengths).tolist()
    if stops[-1] != len(x):
        raise RuntimeError(f"pieces of {list(lengths)} bytes do not fill {len(x)} bytes")
    return [x[stop - length : stop] for stop, length in zip(stops, lengths, strict=True)]


def lower(
    collective: Collective, rank: int, world: int, ops: Ops, like: Array, native_broadcast: bool = False
) -> Request:
    """What ``rank`` sends for a collective.

    Args:
        collective: what the method asks for.
        rank: this rank.
        world: number of ranks.
        ops: the array ops of the payload's library.
        like: an array on the device that every rank's payload must lie on.
        native_broadcast: send a broadcast as it is, not as a sum.
    """
    if isinstance(collective, AllReduce):
        return Request("all_reduce", collective.x, collective.op, may_overwrite=collective.may_overwrite)
    if isinstance(collective, AllGather):
        return Request("all_gather", collective.x)
    if isinstance(collective, AllToAll):
        equal = (len(collective.x) // world,) * world
        return Request(
            "all_to_all",
            collective.x,
            send_lengths=collective.splits or equal,
            recv_lengths=collective.receives or equal,
        )
    root = int(collective.root)
    made = collective.make() if rank == root else None
    if native_broadcast:
        return Request("broadcast", made, send_lengths=(collective.num_bytes,), root=root)
    zeros_or_made = (
        ops.zeros(collective.num_bytes // 4, "int32", like) if made is None else ops.from_bytes(made, "int32")
    )
    return Request("all_reduce", zeros_or_made, may_overwrite=made is None)


def lift(collective: Collective, out: Array, lengths: Sequence[int], ops: Ops) -> Any:
    """A collective's result as the method expects it; ``lengths``: of the pieces that came, in rank order."""
    if isinstance(collective, AllGather | AllToAll):
        return cut(out, lengths)
    return ops.to_bytes(out) if isinstance(collective, Broadcast) else out


def gathered_lengths(out: Array, collective: AllGather, world: int, ops: Ops) -> list[int]:
    """The lengths of the payloads in a gathered buffer, by rank and, where it was for several tensors, by tensor.

    They are this rank's where ``world`` times these fill the buffer, and all headers, if there are any, are alike:
    other lengths might have the same sum. Otherwise the headers tell.

    Raises:
        WireError: the payloads' headers do not fill the buffer.
    """
    mine = collective.x
    own = len(collective.x)
    lengths = collective.lengths or (len(collective.x),)
    if len(out) == own * world:
        ranks = out.reshape(world, own)
        starts = itertools.accumulate(lengths[:-1], initial=0)
        spans = [
            slice(start, start + min(length, wire.NUM_BYTES)) for start, length in zip(starts, lengths, strict=True)
        ]
        heads = ops.concat([each for span in spans for each in (mine[span], ranks[:, span].reshape(-1))])
        known = ops.head_bytes(heads, len(heads))  # all of them at once: each call may wait for a device
        place = 0
        for span, length in zip(spans, lengths, strict=True):
            width = span.stop - span.start
            head, everyones = known[place : place + width], known[place : (place := place + width * (world + 1))]
            if everyones != head * (world + 1) and wire.is_header(head, length):
                break
        else:
            return list(lengths) * world
    return wire.split(ops.head_bytes(out, len(out)), world * len(lengths))


def by_rank(lengths: Sequence[int], world: int) -> list[int]:
    """The bytes of each rank, from those of its payloads."""
    return np.reshape(lengths, (world, -1)).sum(axis=1).tolist()


@dataclass(eq=False)
class Running:
    """A collective under way, and its result once it is there."""

    handle: Handle
    out: Array | None = None


@dataclass(eq=False)
class Pending:
    """A collective under way.

    Attributes:
        running: its collective.
        lengths: of an all-gather or all-to-all, the bytes from each rank, once they are known.
    """

    name: str
    collective: Collective
    request: Request
    ops: Ops
    running: Running
    lengths: Sequence[int] | None = None


class Collectives:
    """The collectives of one rank's exchanges over a transport, told to observers.

    Args:
        transport: the network.
        observers: told of what is sent and of the time spent waiting; the list may grow.
    """

    def __init__(self, transport: Transport, observers: Sequence[Observer]):
        self.transport = transport
        self.observers = observers
        self.group = Group(transport.rank, transport.world)
        self.rank, self.world = self.group
        self.ordered = transport.ordered

    # -- one collective -----------------------------------------------------------------------------------------

    def start(
        self,
        name: str,
        round: int,
        collective: Collective,
        ops: Ops | None = None,
        like: Array | None = None,
        equal: bool = False,
    ) -> Pending:
        """Start the collective of a collective; returns at once.

        Args:
            name: the tensor or bucket.
            round: which of its collectives this is in this step, from 0.
            collective: what the method asks for.
            ops: the array ops of its payload's library (default: the fast CPU one).
            like: an array on the payloads' device.
            equal: of an all-gather, whether all ranks' payloads are known to be as long as this one's.
        """
        ops = ops or hvdcompress.ops.fast
        # Made before observers are told, as the root computes its payload here
        request = lower(collective, self.rank, self.world, ops, like, self.transport.native_broadcast)
        full = f"{name}.round{round}"
        if isinstance(collective, AllGather):
            own = collective.x
            if equal:
                lengths = (len(own),) * self.world
                self._sent(name, Sent("AllGather", own, len(own), lengths))
                request = Request("all_gather", own, recv_lengths=lengths)
            elif not self.transport.variable_lengths:  # MPI and torch.distributed want all lengths before the payloads
                length = np.array([len(own)], np.int64).view(np.uint8)
                self._sent("lengths", Sent("AllGather", length, 8, [8] * self.world))
                asked = Request("all_gather", length, recv_lengths=(8,) * self.world)
                return Pending(name, collective, request, ops, self._start(f"{full}.lengths", asked))
        else:
            root = isinstance(collective, Broadcast) and self.rank == int(collective.root)
            payload = collective.x if not isinstance(collective, Broadcast) else request.payload if root else None
            num_bytes = collective.num_bytes if isinstance(collective, Broadcast) else int(collective.x.nbytes)
            splits = collective.splits if isinstance(collective, AllToAll) else None
            self._sent(name, Sent(type(collective).__name__, payload, num_bytes, splits=splits))
        return Pending(name, collective, request, ops, self._start(full, request), request.recv_lengths)

    def ready(self, pending: Pending) -> bool:
        """Whether :meth:`advance` would return at once."""
        return pending.running.out is not None or self.transport.ready(pending.running.handle)

    def advance(self, pending: Pending) -> bool:
        """Wait for what is under way; whether the collective is done. If not, it has gone on to its next collective."""
        out = self._wait(pending.running)
        if not isinstance(pending.collective, AllGather):
            return True
        own = pending.collective.x
        if pending.lengths is None and not self.transport.variable_lengths:
            pending.lengths = np.asarray(out).view(np.int64).tolist()
            self._sent(pending.name, Sent("AllGather", own, len(own), pending.lengths))
            request = Request("all_gather", own, recv_lengths=tuple(pending.lengths))
            pending.running = self._start(pending.name, request)
            return False
        # Of several tensors that travel together, only the headers tell where each payload begins
        told = pending.lengths is not None
        if not told or pending.collective.lengths:
            lengths = pending.lengths = gathered_lengths(out, pending.collective, self.world, pending.ops)
        if not told:
            self._sent(pending.name, Sent("AllGather", own, len(own), by_rank(lengths, self.world)))
        return True

    def result(self, pending: Pending) -> Any:
        """What a collective that is done has brought, as the method expects it."""
        assert pending.running.out is not None
        return lift(pending.collective, pending.running.out, pending.lengths or (), pending.ops)

    def progress(self, under_way: Sequence[Any]) -> None:
        """Let a transport that has no thread of its own work on the oldest of these exchanges' collectives."""
        if under_way:
            self.transport.ready(under_way[0].pending.running.handle)

    def idle(self, pending: Pending) -> None:
        """Nothing is there: let the transport go on until ``pending`` may be, or for a moment."""
        self._timed(self.transport.idle, pending.running.handle)

    # -- sums of texts, for errors and comparisons ---------------------------------------------------------

    def run(self, name: str, collective: Collective, round: int = 0) -> Any:
        """The result of a collective on numpy arrays; waits."""
        pending = self.start(name, round, collective)
        while not self.advance(pending):
            pass
        return self.result(pending)

    def gather_text(self, what: str, text: str) -> list[str]:
        """Every rank's text, in rank order; waits."""
        data = np.frombuffer(text.encode(), np.uint8).copy()
        sizes = cut(self._gather(f"{what}.size", np.array([len(data)], np.int64).view(np.uint8)), [8] * self.world)
        lengths = [int(size.view(np.int64)[0]) for size in sizes]
        joined = self._gather(what, data, lengths)
        self._sent(what, Sent("AllGather", data, len(data) + 8, [length + 8 for length in lengths]))
        return [piece.tobytes().decode() for piece in cut(joined, lengths)]

    def _gather(self, name: str, data: Array, lengths: Sequence[int] | None = None) -> Any:
        recv_lengths = tuple(lengths or [len(data)] * self.world)
        return self._wait(self._start(name, Request("all_gather", data, recv_lengths=recv_lengths)))

    # -- inside -------------------------------------------------------------------------------------------

    def _start(self, name: str, request: Request) -> Running:
        return Running(self.transport.start(name, request))

    def _wait(self, running: Running) -> Array:
        if running.out is None:
            running.out = self._timed(self.transport.wait, running.handle)
        return running.out

    def _timed(self, function: Callable[[Handle], Any], handle: Handle) -> Any:
        began = time.perf_counter()
        result = function(handle)
        seconds = time.perf_counter() - began
        for observer in self.observers:
            observer.waited(self.rank, seconds)
        return result

    def _sent(self, name: str, what: Sent) -> None:
        for observer in self.observers:
            observer.sent(self.rank, name, what)
