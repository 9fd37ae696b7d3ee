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
from hvdcompress.engine.agreement import peer_error
from hvdcompress.engine.safety.alarm import Alarm, Call, missing_calls
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


class MPITransport:
    """Collectives over one communicator, matched by their order.

    The transport has two duplicates of the communicator, one for collectives and one for alarms, so that neither mixes
    with messages of the program. Constructing it is collective, and so is :meth:`close`.

    Args:
        comm: an intracommunicator.
    """

    ordered = True
    native_broadcast = False
    variable_lengths = False

    def __init__(self, comm: MPI.Comm):
        self.comm = comm.Dup()
        self.alarm_comm = comm.Dup()
        self.rank = comm.rank
        self.world_size = comm.size
        self.step = 0  # number of this step, the same on all ranks
        self._calls: list[Call] = []  # the collectives that this rank has started in this step
        self._running: list[Handle] = []
        self._alarms: Counter[int] = Counter()  # number of alarms received, by step number
        self._listen()

    def close(self) -> None:
        """Free the communicators; collective. Call it when no collective is in flight."""
        self.stop_listening()
        self.comm.Free()
        self.alarm_comm.Free()

    def stop_listening(self) -> None:
        """Cancel the receive for alarms. Not collective: one rank alone may call it, at exit for example."""
        if self._alarm != MPI.REQUEST_NULL and not MPI.Is_finalized():
            self._alarm.Cancel()
            self._alarm.Wait()

    def begin(self) -> None:
        """Begin a step. Forget the last one, which may have failed."""
        self.step += 1
        self._calls.clear()

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
        while handle in self._running:
            if self._alarms[self.step]:
                raise Alarm
            if MPI.Request.Waitany([handle.request, self._alarm]) == 0:
                self._running.remove(handle)
            else:
                self._receive_alarm()  # an alarm of the next step is only counted, and raised in that step
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
        self._calls.append(call)
        self._running.append(Handle(request, out, buffers))
        return self._running[-1]

    # -- failure --------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Post the receive for the next alarm."""
        self._alarm_step = np.zeros(1, np.int64)
        self._alarm = self.alarm_comm.Irecv(self._alarm_step, MPI.ANY_SOURCE)

    def _receive_alarm(self) -> None:
        """Count an alarm that has arrived, and post the receive for the next one."""
        self._alarms[int(self._alarm_step[0])] += 1
        self._listen()

    def fail(self, error: Exception | None) -> Exception:
        """End the step on all ranks after one of them has failed; see ``engine/safety/alarm.py``.

        Every rank tells all others its error and the collectives that it has started. Then each rank joins, with
        zeros, the collectives that only others have started, so that none of them waits forever.

        Args:
            error: the error of this rank, or None if another rank failed.

        Returns:
            The exception that this rank should raise: PeerError with the errors of all ranks, or RuntimeError if the
            ranks are in different steps.
        """
        alarms = []
        if error is not None:
            number = np.array([self.step], np.int64)
            alarms = [self.alarm_comm.Isend(number, rank) for rank in range(self.world_size) if rank != self.rank]
        text = "" if error is None else str(error) or type(error).__name__
        everyone: list[tuple[int, str, list[Call]]] = self.alarm_comm.allgather((self.step, text, self._calls))
        # Each rank with an error of its own has sent an alarm. Receive all of them, or the next step would
        expected = sum(bool(text) for rank, (_, text, _) in enumerate(everyone) if rank != self.rank)
        while self._alarms[self.step] < expected:
            self._alarm.Wait()
            self._receive_alarm()
        del self._alarms[self.step]
        MPI.Request.Waitall(alarms)
        if len({step for step, _, _ in everyone}) > 1:
            counts = ", ".join(f"rank {rank}: {step}" for rank, (step, _, _) in enumerate(everyone))
            return RuntimeError(
                f"the ranks are in different steps and cannot go on ({counts}); call allreduce equally often on each"
            )
        self._join_missing([calls for _, _, calls in everyone])
        return peer_error([text for _, text, _ in everyone])

    def _join_missing(self, everyone: Sequence[Sequence[Call]]) -> None:
        """Take part, with zeros, in every collective of this step that only other ranks have started."""
        for call in missing_calls(everyone, self.rank):
            self._launch(call, np.zeros(call.size, call.dtype))
        MPI.Request.Waitall([handle.request for handle in self._running])
        self._running.clear()


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
