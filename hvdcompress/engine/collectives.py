"""Translation of a method's collectives into requests to a transport, and of the results back, for all transports.

==========  ===================================================================================
collective  request
==========  ===================================================================================
all-reduce  unchanged
all-gather  unchanged; preceded by an all-gather of 8 bytes per rank if the transport needs
            lengths that are not known yet
all-to-all  unchanged; preceded by an all-to-all of 8 bytes per pair of ranks in the same case
broadcast   unchanged, or an int32 sum to which the other ranks contribute zeros
==========  ===================================================================================
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import numpy as np

import hvdcompress.ops
from hvdcompress.engine.telemetry.observer import Observer, Sent
from hvdcompress.engine.transport import Group, Handle, Request, Transport
from hvdcompress.method import AllGather, AllReduce, AllToAll, Array, Broadcast, Collective
from hvdcompress.ops.spec import Ops
from hvdcompress.parts import wire


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


def gathered_lengths(out: Array, collective: AllGather, world_size: int, ops: Ops) -> list[int]:
    """Return the byte lengths of the payloads in a gathered buffer, by rank, and within a rank by tensor.

    If the buffer has ``world_size`` times this rank's length and all headers are equal, the lengths equal this rank's.
    The size alone does not prove it, because other lengths could have the same sum. Otherwise the headers are read.

    Raises:
        WireError: the lengths in the headers do not add up to the length of the buffer.
    """
    mine = collective.x
    own = len(collective.x)
    lengths = collective.lengths or (len(collective.x),)
    if len(out) == own * world_size:
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
            width = span.stop - span.start
            head = known[offset : offset + width]
            heads_of_all = known[offset : offset + width * (world_size + 1)]
            offset += width * (world_size + 1)
            if heads_of_all != head * (world_size + 1) and wire.is_header(head, length):
                break
        else:
            return list(lengths) * world_size
    return wire.split(ops.head_bytes(out, len(out)), world_size * len(lengths))


def received_lengths(out: Array, collective: AllGather | AllToAll, world_size: int, ops: Ops) -> list[int]:
    """Return the byte lengths of the pieces in a received buffer by their headers, as :func:`gathered_lengths` does.

    Raises:
        WireError: the lengths in the headers do not add up to the length of the buffer.
    """
    if isinstance(collective, AllGather):
        return gathered_lengths(out, collective, world_size, ops)
    return wire.split(ops.head_bytes(out, len(out)), world_size * collective.tensors)


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
        handle: the transport's handle of its current collective.
        lengths: for all-gather and all-to-all, the bytes from each rank; None until they are known.
        out: the result of the transport's current collective, once it is available.
    """

    name: str
    collective: Collective
    request: Request
    ops: Ops
    handle: Handle
    lengths: Sequence[int] | None = None
    out: Array | None = None


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
        ops = ops or hvdcompress.ops.fast
        # Before observers are notified, because the root computes its payload here
        request = lower(collective, self.group.rank, self.world_size, ops, like, self.transport.native_broadcast)
        kind = type(collective).__name__
        if lengths is not None:
            request = replace(request, recv_lengths=lengths)
        elif has_headers(collective) and not self.transport.variable_lengths:
            # MPI and torch.distributed need all lengths before the payloads
            own = request.send_lengths or (len(collective.x),)
            announced = np.array(own, np.int64).view(np.uint8)
            eight = (8,) * self.world_size
            self._sent("lengths", Sent(kind, announced, len(announced), eight if kind == "AllGather" else None))
            first = replace(
                request, payload=announced, send_lengths=eight if request.send_lengths else None, recv_lengths=eight
            )
            handle = self.transport.start(f"{name}.round{round}.lengths", first)
            return Pending(name, collective, request, ops, handle)
        if isinstance(collective, Broadcast):
            payload = request.payload if self.group.rank == int(collective.root) else None
            self._sent(name, Sent(kind, payload, collective.num_bytes))
        elif isinstance(collective, AllToAll):
            self._sent(name, Sent(kind, collective.x, collective.x.nbytes, splits=collective.splits))
        elif lengths is not None or not isinstance(collective, AllGather):  # otherwise when the lengths have come
            self._sent(name, Sent(kind, collective.x, collective.x.nbytes, lengths))
        handle = self.transport.start(f"{name}.round{round}", request)
        return Pending(name, collective, request, ops, handle, request.recv_lengths)

    def ready(self, pending: Pending) -> bool:
        """Return whether :meth:`advance` would not block."""
        return pending.out is not None or self.transport.ready(pending.handle)

    def advance(self, pending: Pending) -> bool:
        """Wait for the transport's current collective.

        Returns:
            Whether the method's collective is done. If False, its lengths have arrived and its payloads are in flight.
        """
        if pending.out is None:
            pending.out = self._timed(self.transport.wait, pending.handle)
        out = pending.out
        collective = pending.collective
        if not has_headers(collective):
            return True
        own = collective.x
        splits = None if isinstance(collective, AllGather) else collective.splits
        if pending.lengths is None and not self.transport.variable_lengths:
            # This was the collective of the lengths
            lengths = pending.lengths = np.asarray(out).view(np.int64).tolist()
            known = None if splits else lengths
            self._sent(pending.name, Sent(type(collective).__name__, own, len(own), known, splits))
            pending.handle = self.transport.start(pending.name, replace(pending.request, recv_lengths=tuple(lengths)))
            pending.out = None
            return False
        # For fused payloads, only the headers tell where the payload of each tensor begins
        were_known = pending.lengths is not None
        is_fused = collective.tensors > 1 if isinstance(collective, AllToAll) else bool(collective.lengths)
        if not were_known or is_fused:
            lengths = pending.lengths = received_lengths(out, collective, self.world_size, pending.ops)
        if not were_known and splits is None:
            self._sent(pending.name, Sent("AllGather", own, len(own), by_rank(lengths, self.world_size)))
        return True

    def result(self, pending: Pending) -> Any:
        """Return the result of a finished collective, in the form that the method expects."""
        assert pending.out is not None
        return lift(pending.collective, pending.out, pending.lengths or (), pending.ops)

    def idle(self, pending: Pending) -> None:
        """Let the transport work until the result of ``pending`` may be available, or for a moment."""
        self._timed(self.transport.idle, pending.handle)

    # -- collectives of the engine itself, for statuses and errors --------------------------------

    def run(self, name: str, collective: Collective, round: int = 0) -> Any:
        """Run a collective on NumPy arrays and return its result. Blocks."""
        pending = self.start(name, round, collective)
        while not self.advance(pending):
            pass
        return self.result(pending)

    def gather_text(self, name: str, text: str) -> list[str]:
        """Gather one text per rank, in rank order. Blocks.

        Args:
            name: name of the collective; also of its bytes in the ledger.
            text: the text of this rank.
        """
        data = np.frombuffer(text.encode(), np.uint8).copy()
        # Two collectives, because transports may need lengths in advance. Speed does not matter in error handling.
        sizes = cut(self._gather(f"{name}.size", np.array([len(data)], np.int64).view(np.uint8)), [8] * self.world_size)
        lengths = [int(size.view(np.int64)[0]) for size in sizes]
        joined = self._gather(name, data, lengths)
        self._sent(name, Sent("AllGather", data, len(data) + 8, [length + 8 for length in lengths]))
        return [piece.tobytes().decode() for piece in cut(joined, lengths)]

    def _gather(self, name: str, data: Array, lengths: Sequence[int] | None = None) -> Any:
        recv_lengths = tuple(lengths or [len(data)] * self.world_size)
        handle = self.transport.start(name, Request("all_gather", data, recv_lengths=recv_lengths))
        return self._timed(self.transport.wait, handle)

    # -- inside -------------------------------------------------------------------------------------------

    def _timed(self, function: Callable[[Handle], Any], handle: Handle) -> Any:
        began = time.perf_counter()
        result = function(handle)
        seconds = time.perf_counter() - began
        for observer in self.observers:
            observer.waited(self.rank, seconds)
        return result

    def _sent(self, name: str, event: Sent) -> None:
        event = event._replace(group=self.group, inside_node=self.inside_node)
        for observer in self.observers:
            observer.sent(self.rank, name, event)
