"""The engine's transport over MPI: non-blocking collectives, and the alarm of a rank that fails.

MPI collectives have no names: every rank must start them in the same order. A rank that fails in the middle of a step
therefore sounds an alarm (``engine/safety/alarm.py``). Here an alarm is a message to every other rank, on a separate
communicator. It contains the step number, because a rank may receive an alarm of the next step while it still waits for
the last result of this one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from mpi4py import MPI

import hvdcompress.ops
from hvdcompress.engine.agreement import text_of
from hvdcompress.engine.nodes import Nodes
from hvdcompress.engine.safety.alarm import Alarm, AlarmTransport, Call
from hvdcompress.engine.transport import Request

Array = np.ndarray[Any, Any]


@dataclass(eq=False)
class Handle:
    """A collective in flight.

    Attributes:
        request: MPI's request.
        out: the array that receives the result.
        buffers: all buffers of the call. The handle keeps them alive until the collective is done.
    """

    request: MPI.Request
    out: Array
    buffers: list[Any]


class MPITransport(AlarmTransport):
    """Collectives over one communicator, matched by their order.

    The transport has a duplicate of the communicator, so that its messages do not mix with those of the program.
    Constructing it is collective, and so is :meth:`close`.

    Args:
        comm: an intracommunicator.
        alarms: the alarms of all ranks. None to make them, for the ranks of ``comm``.
        ranks: the ranks of ``comm``, as ranks of the alarms; None if they are the same.
    """

    def __init__(self, comm: MPI.Comm, alarms: Alarms | None = None, ranks: Sequence[int] | None = None):
        super().__init__(alarms or Alarms(comm), ranks or range(comm.size))
        self.comm = comm.Dup()
        self.rank = comm.rank
        self.world_size = comm.size
        # With other numbers of ranks than a power of 2, Open MPI 4.1 reduces to one rank and broadcasts from there: the
        # busiest of 3 or 5 ranks sends 2 or 3 times the array in place of 1.33 or 1.6. With our function for float16,
        # each of 4 ranks sends 2 times the array in place of 1.5, under every MPI
        self.shards_sums = ("float16", "float32", "float64") if comm.size & (comm.size - 1) else ("float16",)

    def close(self) -> None:
        """Free the communicators; collective. Call it when no collective is in flight."""
        for transport in (self, *self.parts):
            transport.comm.Free()
        self.alarms.close()

    def split(self, nodes: Nodes) -> tuple[MPITransport, MPITransport, MPITransport]:
        """Return transports to the owners of a node, between nodes, and from the owners of a node; collective.

        Args:
            nodes: the nodes.
        """
        inside = nodes.ranks_of_node(nodes.node_of(self.rank))
        between = nodes.counterparts(nodes.local_rank(self.rank))
        for ranks in (inside, between, inside):
            comm = self.comm.Split(ranks[0])
            self.parts.append(MPITransport(comm, self.alarms, ranks))
            comm.Free()
        return self.parts[0], self.parts[1], self.parts[2]

    # -- collectives ----------------------------------------------------------------------------------------

    def start(self, name: str, request: Request) -> Handle:
        """Start a collective; return without waiting for it."""
        payload = np.ascontiguousarray(request.payload)
        call = Call(
            request.kind, str(payload.dtype), len(payload), request.op, request.send_lengths, request.recv_lengths
        )
        return self._launch(call, payload, request.may_overwrite)

    def ready(self, handle: Handle) -> bool:
        """Return whether the result is available (:meth:`wait` would not block).

        The call also lets MPI make progress: it moves data only inside of its functions.
        """
        return handle.request == MPI.REQUEST_NULL or handle.request.Get_status()

    def wait(self, handle: Handle) -> Array:
        """Wait for a collective and return its result, a flat array.

        Raises:
            Alarm: a rank has failed in this step.
        """
        while handle in self.running:
            if self.alarms.wait(handle.request):
                self.running.remove(handle)
        return handle.out

    def idle(self, handle: Handle) -> None:
        """Wait for the result: MPI makes no progress while the process sleeps."""
        self.wait(handle)

    def _launch(self, call: Call, payload: Array, may_overwrite: bool = False) -> Handle:
        """Start a collective and record it, so that :meth:`fail` can tell the other ranks about it."""
        out: Array
        buffers: list[Any]
        if call.kind == "all_reduce":
            out = payload if may_overwrite else np.empty_like(payload)
            # MPI has no float16 type: send the values as 16-bit integers, with our own reduction function
            half = call.dtype == "float16"
            sent, received = (each.view(np.uint16) if half else each for each in (payload, out))
            buffers = [MPI.IN_PLACE if may_overwrite else sent, received]
            request = self.comm.Iallreduce(buffers[0], buffers[1], _half(call.op) if half else OPS[call.op])
        else:
            recv_lengths = call.recv_lengths or ()
            out = np.empty(sum(recv_lengths), np.uint8)
            receive_buffer = [out, (recv_lengths, _starts(recv_lengths)), MPI.BYTE]
            if call.kind == "all_gather":
                buffers = [[payload, MPI.BYTE], receive_buffer]
                request = self.comm.Iallgatherv(*buffers)
            else:
                send_lengths = call.send_lengths or ()
                buffers = [[payload, (send_lengths, _starts(send_lengths)), MPI.BYTE], receive_buffer]
                request = self.comm.Ialltoallv(*buffers)
        self.calls.append(call)
        self.running.append(Handle(request, out, buffers))
        return self.running[-1]

    # -- failure --------------------------------------------------------------------------------------------

    def join(self, calls: Sequence[Call]) -> None:
        """Start collectives with zeros, and wait for all collectives in flight."""
        for call in calls:
            self._launch(call, np.zeros(call.size, call.dtype))
        MPI.Request.Waitall([handle.request for handle in self.running])
        self.running.clear()


class Alarms:
    """Alarms between the ranks of a communicator, for all transports of these ranks.

    Args:
        comm: an intracommunicator. Alarms have a duplicate of their own.

    Attributes:
        step: number of this step, the same on all ranks.
    """

    def __init__(self, comm: MPI.Comm):
        self.comm = comm.Dup()
        self.step = 0
        self._received: Counter[int] = Counter()  # number of alarms received, by step number
        self._listen()

    def close(self) -> None:
        """Free the communicator; collective."""
        self.stop_listening()
        self.comm.Free()

    def stop_listening(self) -> None:
        """Cancel the receive for alarms. Not collective: one rank alone may call it, at exit for example."""
        if self._alarm != MPI.REQUEST_NULL and not MPI.Is_finalized():
            self._alarm.Cancel()
            self._alarm.Wait()

    def wait(self, request: MPI.Request) -> bool:
        """Wait for a request or an alarm, and return whether the request is done.

        Raises:
            Alarm: a rank has failed in this step.
        """
        if self._received[self.step]:
            raise Alarm
        if MPI.Request.Waitany([request, self._alarm]) == 0:
            return True
        self._receive()  # an alarm of the next step is only counted, and raised in that step
        return False

    def _listen(self) -> None:
        """Post the receive for the next alarm."""
        self._alarm_step = np.zeros(1, np.int64)
        self._alarm = self.comm.Irecv(self._alarm_step, MPI.ANY_SOURCE)

    def _receive(self) -> None:
        """Count an alarm that has arrived, and post the receive for the next one."""
        self._received[int(self._alarm_step[0])] += 1
        self._listen()

    def exchange(self, error: Exception | None, calls: Sequence[Sequence[Call]]) -> list[tuple[str, list[list[Call]]]]:
        """Send an alarm after an error of this rank, and exchange errors and calls with all ranks.

        Args:
            error: the error of this rank, or None.
            calls: for each transport, the collectives that this rank has started in this step.

        Returns:
            For every rank, its error text and its ``calls``.

        Raises:
            RuntimeError: the ranks are in different steps.
        """
        alarms = []
        if error is not None:
            number = np.array([self.step], np.int64)
            alarms = [self.comm.Isend(number, rank) for rank in range(self.comm.size) if rank != self.comm.rank]
        text = text_of(error)
        everyone = self.comm.allgather((self.step, text, calls))
        # Each rank with an error of its own has sent an alarm. Receive all of them, or the next step would
        expected = sum(bool(text) for rank, (_, text, _) in enumerate(everyone) if rank != self.comm.rank)
        while self._received[self.step] < expected:
            self._alarm.Wait()
            self._receive()
        del self._received[self.step]
        MPI.Request.Waitall(alarms)
        if any(step != self.step for step, _, _ in everyone):
            counts = ", ".join(f"rank {rank}: {step}" for rank, (step, _, _) in enumerate(everyone))
            raise RuntimeError(
                f"the ranks are in different steps and cannot go on ({counts}); call allreduce equally often on each"
            )
        return [(text, calls) for _, text, calls in everyone]


OPS = {"sum": MPI.SUM, "max": MPI.MAX}


@cache
def _half(op: str) -> MPI.Op:
    """Return an MPI reduction for float16, sent as 16-bit integers. A sum is rounded to float16 after each addition."""

    def combine(given: Any, total: Any, datatype: MPI.Datatype) -> None:
        a = np.frombuffer(given, np.float16)
        b = np.frombuffer(total, np.float16)
        if op == "sum":
            hvdcompress.ops.fast.add_all([b, a], into_first=True)
        else:
            np.maximum(a, b, out=b)

    return MPI.Op.Create(combine, commute=True)


def _starts(lengths: Sequence[int]) -> tuple[int, ...]:
    """Return the start offset of each of several consecutive pieces."""
    return tuple(np.cumsum([0, *lengths[:-1]]).tolist())
