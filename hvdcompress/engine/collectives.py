"""Translation of a method's collectives into requests to a transport, and of the results back, for all transports.

==========  ===================================================================================
collective  request
==========  ===================================================================================
all-reduce  unchanged; or a large sum as an all-to-all and an all-gather of its shards, if
            that costs the transport less
all-gather  unchanged; preceded by an all-gather of 8 bytes per rank if the transport needs
            lengths that are not known yet
all-to-all  unchanged; preceded by an all-to-all of 8 bytes per pair of ranks in the same case
broadcast   unchanged, or an int32 sum to which the other ranks contribute zeros
==========  ===================================================================================
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import numpy as np

import hvdcompress.ops
from hvdcompress.engine.telemetry.observer import Observer, Sent
from hvdcompress.engine.transport import Group, Handle, Request, Transport
from hvdcompress.method import AllGather, AllReduce, AllToAll, Array, Broadcast, Collective
from hvdcompress.ops.spec import Ops
from hvdcompress.ops.vectors import dtype_name
from hvdcompress.parts import wire

LARGE = 1 << 16  #: bytes; the latency of a second collective weighs more than what shards save of a smaller sum


def cut(x: Any, lengths: Sequence[int]) -> list[Any]:
    """Split ``x`` into consecutive pieces of these lengths. The pieces are views.

    Raises:
        RuntimeError: the lengths do not add up to ``len(x)``.
    """
    stops = np.cumsum(lengths).tolist()
    if stops[-1] != len(x):
        raise RuntimeError(f"pieces of {list(lengths)} bytes do not fill {len(x)} bytes")
    return [x[stop - length : stop] for stop, length in zip(stops, lengths, strict=True)]


def require_collective(yielded: Any) -> Collective:
    """Return what a method's ``exchange`` yielded.

    Raises:
        TypeError: it is not a collective.
    """
    if isinstance(yielded, Collective):
        return yielded
    kind = type(yielded).__name__
    raise TypeError(f"exchange() yielded {kind}; it must yield AllReduce, AllGather, Broadcast or AllToAll")


def lower(
    collective: Collective, rank: int, world_size: int, ops: Ops, like: Array, native_broadcast: bool = False
) -> Request:
    """Return the request to the transport for a collective of a method.

    Args:
        collective: the collective that the method yielded.
        rank: this rank.
        world_size: number of ranks.
        ops: the array ops of the payload's library.
        like: an array on the device on which every rank's payload must be.
        native_broadcast: whether to request a broadcast, and not a sum.
    """
    if isinstance(collective, AllReduce):
        return Request("all_reduce", collective.x, collective.op, may_overwrite=collective.may_overwrite)
    if isinstance(collective, AllGather):
        return Request("all_gather", collective.x)
    if isinstance(collective, AllToAll):
        equal = (len(collective.x) // world_size,) * world_size
        return Request(
            "all_to_all",
            collective.x,
            send_lengths=collective.splits or equal,
            recv_lengths=None if collective.receives_unknown else collective.receives or equal,
        )
    # Only the root computes the payload. An int32 sum adds bit patterns without rounding, unlike a float sum.
    root = int(collective.root)
    made = collective.make() if rank == root else None
    if native_broadcast:
        return Request("broadcast", made, send_lengths=(collective.num_bytes,), root=root)
    zeros_or_made = (
        ops.zeros(collective.num_bytes // 4, "int32", like) if made is None else ops.from_bytes(made, "int32")
    )
    return Request("all_reduce", zeros_or_made, may_overwrite=made is None)


def lift(collective: Collective, out: Array, lengths: Sequence[int], ops: Ops) -> Any:
    """Convert the result of a transport into the form that the method expects.

    Args:
        collective: the collective that the method yielded.
        out: the flat result of the transport, or the list of its pieces.
        lengths: byte lengths of the received pieces, in rank order; for all-gather and all-to-all only.
        ops: the array ops of the payload's library.
    """
    if isinstance(collective, AllGather | AllToAll):
        return out if isinstance(out, list) else cut(out, lengths)
    return ops.to_bytes(out) if isinstance(collective, Broadcast) else out


def received_lengths(out: Array, collective: AllGather | AllToAll, world_size: int, ops: Ops) -> list[int]:
    """Return the byte lengths of the pieces in a received buffer, by rank, and within a rank by tensor.

    If a gathered buffer has ``world_size`` times this rank's length and all headers are equal, the lengths equal this
    rank's. The size alone does not prove it, because other lengths could have the same sum. Otherwise the headers are
    read.

    Raises:
        WireError: the lengths in the headers do not add up to the length of the buffer.
    """
    mine = collective.x
    own = len(mine)
    lengths = (collective.lengths if isinstance(collective, AllGather) else (0,) * collective.tensors) or (own,)
    if isinstance(collective, AllGather) and len(out) == own * world_size:
        ranks = out.reshape(world_size, own)
        starts = itertools.accumulate(lengths[:-1], initial=0)
        spans = [
            slice(start, start + min(length, wire.NUM_BYTES)) for start, length in zip(starts, lengths, strict=True)
        ]
        heads = ops.concat([each for span in spans for each in (mine[span], ranks[:, span].reshape(-1))])
        # One copy to the host for all headers: each call may synchronise with the device
        known = ops.head_bytes(heads, len(heads))
        offset = 0
        for span, length in zip(spans, lengths, strict=True):
            size = span.stop - span.start
            heads_of_all = known[offset : offset + size * (world_size + 1)]
            offset += len(heads_of_all)
            head = heads_of_all[:size]
            if heads_of_all != head * (world_size + 1) and wire.is_header(head, length):
                break
        else:
            return list(lengths) * world_size
    return wire.split(ops.head_bytes(out, len(out)), world_size * len(lengths))


def has_headers(collective: Collective) -> TypeGuard[AllGather | AllToAll]:
    """Return whether a rank may have to read the lengths of what it receives from headers."""
    return isinstance(collective, AllGather) or (isinstance(collective, AllToAll) and collective.receives_unknown)


def by_rank(lengths: Sequence[int], world_size: int) -> list[int]:
    """Return the bytes of each rank, given the bytes of all payloads, rank by rank."""
    return np.reshape(lengths, (world_size, -1)).sum(axis=1).tolist()


@dataclass(eq=False)
class Pending:
    """A method's collective in flight. It may take two collectives of the transport: lengths, then payloads.

    Attributes:
        steps: the generator that starts the collectives of the transport.
        handle: the transport's handle of the current one.
        result: the result of the method's collective, in the form that the method expects, once it is done.
        lengths: then, for an all-gather, the bytes of all payloads, rank by rank.
    """

    steps: Generator[Handle, Any, tuple[Any, Sequence[int]]]
    handle: Handle
    result: Any = None
    lengths: Sequence[int] = ()


class Collectives:
    """The collectives of one rank over a transport; reports them to observers.

    Args:
        transport: the network.
        observers: receive the payloads and the time spent waiting. The list may grow.
        rank: this rank among all ranks, if the transport connects only some of them.
        inside_node: whether all ranks are on one node, and exchange with other nodes by other collectives.
    """

    def __init__(
        self,
        transport: Transport,
        observers: Sequence[Observer],
        rank: int | None = None,
        inside_node: bool = False,
    ):
        self.transport = transport
        self.observers = observers
        self.inside_node = inside_node
        self.group = Group(transport.rank, transport.world_size)
        self.world_size = transport.world_size
        self.rank = transport.rank if rank is None else rank
        self.ordered = transport.ordered

    # -- one collective -----------------------------------------------------------------------------------------

    def start(
        self,
        name: str,
        round: int,
        collective: Collective,
        ops: Ops | None = None,
        like: Array | None = None,
        lengths: tuple[int, ...] | None = None,
    ) -> Pending:
        """Start a method's collective without waiting.

        Args:
            name: name of the tensor or bucket.
            round: index of the collective in its exchange, from 0.
            collective: the collective that the method yielded.
            ops: the array ops of the payload's library; by default those of NumPy.
            like: an array on the payloads' device.
            lengths: for an all-gather, the bytes of each rank's payload if they are known.
        """
        steps = self._steps(name, f"{name}.round{round}", collective, ops or hvdcompress.ops.fast, like, lengths)
        return Pending(steps, next(steps))

    def _steps(
        self, name: str, label: str, collective: Collective, ops: Ops, like: Any, lengths: tuple[int, ...] | None
    ) -> Generator[Handle, Any, tuple[Any, Sequence[int]]]:
        """Start the transport's collectives for one of a method, yield their handles, and are sent their results.

        Returns:
            The result in the form that the method expects; and for an all-gather, the bytes of all payloads.
        """
        # Before observers are notified, because the root computes its payload here
        request = lower(collective, self.group.rank, self.world_size, ops, like, self.transport.native_broadcast)
        kind = type(collective).__name__
        if isinstance(collective, Broadcast):
            payload = request.payload if self.group.rank == int(collective.root) else None
            self.report(name, kind, payload, collective.num_bytes)
            return lift(collective, (yield self.transport.start(label, request)), (), ops), ()
        own = collective.x
        splits = collective.splits if isinstance(collective, AllToAll) else None
        if not has_headers(collective):
            self.report(name, kind, own, own.nbytes, splits=splits)
            is_sum = request.kind == "all_reduce" and request.op == "sum"
            if is_sum and own.nbytes >= LARGE and dtype_name(own) in self.transport.shards_sums:
                return (yield from self._sum_of_shards(label, own, ops)), ()
            out = yield self.transport.start(label, request)
            return lift(collective, out, request.recv_lengths or (), ops), ()
        if lengths is None and not self.transport.variable_lengths:
            # MPI and torch.distributed need all lengths before the payloads
            announced = np.array(splits or (len(own),), np.int64).view(np.uint8)
            eight = (8,) * self.world_size
            self.report("lengths", kind, announced, len(announced), None if splits else eight)
            first = replace(request, payload=announced, send_lengths=eight if splits else None, recv_lengths=eight)
            found = yield self.transport.start(f"{label}.lengths", first)
            lengths = tuple(np.asarray(found).view(np.int64).tolist())
        if splits or lengths is not None:
            self.report(name, kind, own, own.nbytes, None if splits else lengths, splits)
        out = yield self.transport.start(label, replace(request, recv_lengths=lengths))
        # For fused payloads, only the headers tell where the payload of each tensor begins
        is_fused = collective.tensors > 1 if isinstance(collective, AllToAll) else bool(collective.lengths)
        received = received_lengths(out, collective, self.world_size, ops) if lengths is None or is_fused else lengths
        if lengths is None and not splits:
            self.report(name, kind, own, own.nbytes, by_rank(received, self.world_size))
        return lift(collective, out, received, ops), received

    def _sum_of_shards(self, label: str, x: Array, ops: Ops) -> Generator[Handle, Any, Array]:
        """Return the sum of an array over ranks, of which each rank adds up a shard, in the order of the ranks."""
        bounds = np.arange(self.world_size + 1) * len(x) // self.world_size * x.itemsize
        lengths = tuple(np.diff(bounds).tolist())
        own = (lengths[self.group.rank],) * self.world_size
        request = Request("all_to_all", ops.to_bytes(x), send_lengths=lengths, recv_lengths=own)
        received = yield self.transport.start(f"{label}.shards", request)
        shards = [ops.from_bytes(shard, dtype_name(x)) for shard in cut(received, own)]
        request = Request("all_gather", ops.to_bytes(ops.add_all(shards)), recv_lengths=lengths)
        return ops.from_bytes((yield self.transport.start(label, request)), dtype_name(x))

    def ready(self, pending: Pending) -> bool:
        """Return whether :meth:`advance` would not block."""
        return self.transport.ready(pending.handle)

    def advance(self, pending: Pending) -> bool:
        """Wait for the transport's current collective; see :meth:`receive` for the return value."""
        return self.receive(pending, self._timed(self.transport.wait, pending.handle))

    def receive(self, pending: Pending, out: Any) -> bool:
        """Take the result of the transport's current collective.

        Returns:
            Whether the method's collective is done. If False, its lengths have arrived and its payloads are in flight.
        """
        try:
            pending.handle = pending.steps.send(out)
        except StopIteration as stop:
            pending.result, pending.lengths = stop.value
            return True
        return False

    def idle(self, pending: Pending) -> None:
        """Let the transport work until the result of ``pending`` may be available, or for a moment."""
        self._timed(self.transport.idle, pending.handle)

    # -- collectives of the engine itself, for statuses and errors --------------------------------

    def run(self, name: str, collective: Collective, round: int = 0, lengths: tuple[int, ...] | None = None) -> Any:
        """Run a collective on NumPy arrays and return its result. Blocks. See :meth:`start` for the arguments."""
        pending = self.start(name, round, collective, lengths=lengths)
        while not self.advance(pending):
            pass
        return pending.result

    def gather_text(self, name: str, text: str) -> list[str]:
        """Gather one text per rank, in rank order. Blocks.

        Args:
            name: name of the collective; also of its bytes in the ledger.
            text: the text of this rank.
        """
        data = np.frombuffer(text.encode(), np.uint8).copy()
        # Two collectives, because transports may need lengths in advance. Speed does not matter in error handling.
        length = AllGather(np.array([len(data)], np.int64).view(np.uint8))
        sizes = self.run(name, length, lengths=(8,) * self.world_size)
        lengths = tuple(int(size.view(np.int64)[0]) for size in sizes)
        return [piece.tobytes().decode() for piece in self.run(name, AllGather(data), 1, lengths)]

    # -- inside -------------------------------------------------------------------------------------------

    def _timed(self, function: Callable[[Handle], Any], handle: Handle) -> Any:
        began = time.perf_counter()
        result = function(handle)
        seconds = time.perf_counter() - began
        for observer in self.observers:
            observer.waited(self.rank, seconds)
        return result

    def report(
        self,
        name: str,
        kind: str,
        payload: Array | None,
        num_bytes: int,
        lengths: Sequence[int] | None = None,
        splits: Sequence[int] | None = None,
    ) -> None:
        """Tell the observers of a payload that is passed to a collective of these ranks; see :class:`Sent`."""
        event = Sent(kind, payload, num_bytes, lengths, splits, self.group, self.inside_node)
        for observer in self.observers:
            observer.sent(self.rank, name, event)
