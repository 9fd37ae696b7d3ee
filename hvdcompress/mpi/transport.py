"""MPI's non-blocking collectives, and the alarm by which a rank that fails frees the others.

MPI's collectives have no names: order is all there is (``engine/safety/alarm.py``). An alarm is a message to every
other rank, on a communicator of its own. It carries the number of its step, as a rank may hear one of the next step
while it waits for the last answer of this one.
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
from hvdcompress.engine.agreement import peer_error
from hvdcompress.engine.safety.alarm import Alarm, Call, missing_calls
from hvdcompress.engine.transport import Request

Array = np.ndarray[Any, Any]


@dataclass(eq=False)
class Handle:
    """A collective under way: MPI's request, where its result goes, and all buffers, which must live as long as it."""

    request: MPI.Request
    out: Array
    buffers: list[Any]


class MPITransport:
    """Collectives over one communicator, by order.

    Two communicators of our own keep them apart from the program's and from alarms. Making one is collective, and so is
    :meth:`close`.

    Args:
        comm: an intracommunicator; it is duplicated.
    """

    ordered = True
    native_broadcast = False
    variable_lengths = False

    def __init__(self, comm: MPI.Comm):
        self.comm = comm.Dup()
        self.side = comm.Dup()
        self.rank, self.world = comm.rank, comm.size
        self.step = 0  # the number of this step, the same on all ranks
        self._calls: list[Call] = []  # of this step
        self._running: list[Handle] = []
        self._heard: Counter[int] = Counter()  # alarms by the step that they are of
        self._listen()

    def close(self) -> None:
        """Give the communicators back; collective. Nothing may be under way."""
        self.silence()
        self.comm.Free()
        self.side.Free()

    def silence(self) -> None:
        """Stop listening for alarms; may be called at exit, on one rank alone."""
        if self._alarm != MPI.REQUEST_NULL and not MPI.Is_finalized():
            self._alarm.Cancel()
            self._alarm.Wait()

    def begin(self) -> None:
        """A step begins: nothing is left of the last one, however it ended."""
        self.step += 1
        self._calls.clear()

    # -- collectives ----------------------------------------------------------------------------------------

    def start(self, name: str, request: Request) -> Handle:
        """Begin a collective; returns at once."""
        payload = np.ascontiguousarray(request.payload)
        call = Call(
            request.kind, str(payload.dtype), len(payload), request.op, request.send_lengths, request.recv_lengths
        )
        return self._begin(call, payload, request.may_overwrite)

    def ready(self, handle: Handle) -> bool:
        """Whether :meth:`wait` would return at once. MPI works on what is under way only when it is called."""
        return handle.request == MPI.REQUEST_NULL or handle.request.Get_status()

    def wait(self, handle: Handle) -> Array:
        """The result.

        Raises:
            Alarm: a rank has failed in this step.
        """
        while handle in self._running:
            if self._heard[self.step]:
                raise Alarm
            if MPI.Request.Waitany([handle.request, self._alarm]) == 0:
                self._running.remove(handle)
            else:
                self._hear()  # one of the next step must wait until this step has ended
        return handle.out

    def idle(self, handle: Handle) -> None:
        """Wait for the result."""
        self.wait(handle)

    def _begin(self, call: Call, payload: Array, may_overwrite: bool = False) -> Handle:
        """Call MPI, and note what was called."""
        out: Array
        buffers: list[Any]
        if call.kind == "all_reduce":
            out = payload if may_overwrite else np.empty_like(payload)
            half = call.dtype == "float16"  # MPI has no such type: it carries 16 bits, and we add them
            sent, received = (each.view(np.uint16) if half else each for each in (payload, out))
            buffers = [MPI.IN_PLACE if may_overwrite else sent, received]
            request = self.comm.Iallreduce(buffers[0], buffers[1], _half(call.op) if half else OPS[call.op])
        else:
            recv_lengths = call.recv_lengths or ()
            out = np.empty(sum(recv_lengths), np.uint8)
            taken = [out, (recv_lengths, _starts(recv_lengths)), MPI.BYTE]
            if call.kind == "all_gather":
                buffers = [[payload, MPI.BYTE], taken]
                request = self.comm.Iallgatherv(*buffers)
            else:
                send_lengths = call.send_lengths or ()
                buffers = [[payload, (send_lengths, _starts(send_lengths)), MPI.BYTE], taken]
                request = self.comm.Ialltoallv(*buffers)
        self._calls.append(call)
        self._running.append(Handle(request, out, buffers))
        return self._running[-1]

    # -- failure --------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        self._number = np.zeros(1, np.int64)
        self._alarm = self.side.Irecv(self._number, MPI.ANY_SOURCE)

    def _hear(self) -> None:
        """An alarm has come: note its step, and listen for the next one."""
        self._heard[int(self._number[0])] += 1
        self._listen()

    def fail(self, error: Exception | None) -> Exception:
        """End the step on all ranks, one of which has failed; see ``engine/safety/alarm.py``."""
        alarms = []
        if error is not None:
            number = np.array([self.step], np.int64)
            alarms = [self.side.Isend(number, rank) for rank in range(self.world) if rank != self.rank]
        text = "" if error is None else str(error) or type(error).__name__
        everyone: list[tuple[int, str, list[Call]]] = self.side.allgather((self.step, text, self._calls))
        # every other rank that failed by itself has sent an alarm: take them all in
        expected = sum(bool(text) for rank, (_, text, _) in enumerate(everyone) if rank != self.rank)
        while self._heard[self.step] < expected:
            self._alarm.Wait()
            self._hear()
        del self._heard[self.step]
        MPI.Request.Waitall(alarms)
        if len({step for step, _, _ in everyone}) > 1:
            counts = ", ".join(f"rank {rank}: {step}" for rank, (step, _, _) in enumerate(everyone))
            return RuntimeError(f"the ranks are in different steps, so they cannot go on: {counts}")
        self._catch_up([calls for _, _, calls in everyone])
        return peer_error([text for _, text, _ in everyone])

    def _catch_up(self, everyone: Sequence[Sequence[Call]]) -> None:
        """Take part, with zeros, in every collective of this step that another rank has begun."""
        for call in missing_calls(everyone, self.rank):
            self._begin(call, np.zeros(call.size, call.dtype))
        MPI.Request.Waitall([handle.request for handle in self._running])
        self._running.clear()


OPS = {"sum": MPI.SUM, "max": MPI.MAX}


@cache
def _half(op: str) -> MPI.Op:
    """MPI's operation on float16, of which it knows nothing: rounded to float16 after each addition."""

    def combine(given: Any, total: Any, datatype: MPI.Datatype) -> None:
        a = np.frombuffer(given, np.float16)
        b = np.frombuffer(total, np.float16)
        if op == "sum":
            hvdcompress.ops.fast.add_all([b, a], into_first=True)
        else:
            np.maximum(a, b, out=b)

    return MPI.Op.Create(combine, commute=True)


def _starts(lengths: Sequence[int]) -> tuple[int, ...]:
    return tuple(np.cumsum([0, *lengths[:-1]]).tolist())
