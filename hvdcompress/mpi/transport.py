"""MPI's non-blocking collectives as the verbs want them, and the alarm by which a rank that fails frees the others."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from hvdcompress.engine.agreement import failure
from hvdcompress.engine.ledger import Ledger
from hvdcompress.loopback import cut
from hvdcompress.method import AllGather, AllReduce, AllToAll, Broadcast, Verb

Array = np.ndarray[Any, Any]
FUSED = 1 << 15  #: bytes from which an all-reduce goes by itself; smaller ones that follow each other are one


class Alarm(Exception):
    """Another rank has failed and waits in :meth:`Net.fail`."""


class Call(NamedTuple):
    """One of MPI's collectives as this rank called it, so that a rank that failed before it can make it up.

    ``kind``: "reduce" (of ``dtype``, ``size`` and ``op``), "gather" or "exchange" (bytes given to and got from
    each rank: ``gives``, ``gets``).
    """

    kind: str
    dtype: str = "uint8"
    size: int = 0
    op: str = "sum"
    gives: tuple[int, ...] = ()
    gets: tuple[int, ...] = ()


@dataclass(eq=False)
class Running:
    """A collective under way: MPI's request, where its result goes, and all buffers, which must live as long as it."""

    request: MPI.Request
    out: Array
    buffers: list[Any]
    done: bool = False


@dataclass(eq=False)
class Pending:
    """A verb on its way: the collective that it is part of, from ``start`` on, or None before that is called; and the
    lengths of the ranks' payloads, once an all-gather knows them."""

    name: str
    verb: Verb
    payload: Array
    running: Running | None = None
    start: int = 0
    lengths: list[int] | None = None


class Net:
    """Collectives over one communicator, charged to a ledger.

    MPI's collectives have no names: all ranks call them in one order. Two communicators of our own keep them apart
    from the program's and from the alarm. Making one is collective, and so is :meth:`close`.
    """

    def __init__(self, comm: MPI.Comm, ledger: Ledger):
        self.comm, self.side = comm.Dup(), comm.Dup()
        self.ledger, self.rank, self.world = ledger, comm.rank, comm.size
        self.calls: list[Call] = []  # of this step
        self._running: list[Running] = []
        self._open: list[Pending] = []  # all-reduces of one kind that wait for more of it
        self._listen()

    def _listen(self) -> None:
        self._alarm = self.side.Irecv(bytearray(0), MPI.ANY_SOURCE)

    def close(self) -> None:
        """Give the communicators back. Nothing may be under way."""
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
        self.calls.clear()
        self._open.clear()

    # -- verbs -------------------------------------------------------------------------------------------

    def submit(self, name: str, verb: Verb) -> Pending:
        """Start a verb's collective for tensor ``name``, or let it wait for more (:meth:`flush`); returns at once."""
        payload: Array
        if isinstance(verb, AllReduce | Broadcast):
            if isinstance(verb, AllReduce):
                payload = np.ascontiguousarray(verb.x)
            elif self.rank == int(verb.root):  # as a sum, like the other drivers, so that all ledgers agree
                payload = np.ascontiguousarray(verb.make()).view(np.int32)
            else:
                payload = np.zeros(verb.num_bytes // 4, np.int32)
            self.ledger.add(self.rank, name, type(verb).__name__, payload.nbytes)
            return self._fuse(Pending(name, verb, payload))
        self.flush()
        payload = np.ascontiguousarray(verb.x)
        if isinstance(verb, AllGather):  # first, their lengths
            self.ledger.add(self.rank, "lengths", "AllGather", 8, [8] * self.world)
            length = np.array([len(payload)], np.int64).view(np.uint8)
            return Pending(name, verb, payload, self._call(Call("gather", gets=(8,) * self.world), length))
        self.ledger.add(self.rank, name, "AllToAll", len(payload), splits=verb.splits)
        equal = (len(payload) // self.world,) * self.world
        call = Call("exchange", gives=verb.splits or equal, gets=verb.receives or equal)
        return Pending(name, verb, payload, self._call(call, payload))

    def _fuse(self, pending: Pending) -> Pending:
        """Put an all-reduce to those that wait, if it is small and of their kind. What a call costs is then shared.

        All of that follows from the verbs, so ranks agree on it.
        """
        if self._open and (_kind(pending) != _kind(self._open[0]) or pending.payload.nbytes >= FUSED):
            self.flush()
        self._open.append(pending)
        if sum(each.payload.nbytes for each in self._open) >= FUSED:
            self.flush()
        return pending

    def flush(self) -> None:
        """Start the all-reduces that wait for more of their kind, as one."""
        if not self._open:
            return
        together, self._open = self._open, []
        joined = together[0].payload if len(together) == 1 else np.concatenate([each.payload for each in together])
        dtype, op = _kind(together[0])
        running, start = self._call(Call("reduce", dtype, len(joined), op), joined), 0
        for each in together:
            each.running, each.start = running, start
            start += len(each.payload)

    def advance(self, pending: Pending) -> bool:
        """Wait for what is under way; whether the verb is done. If not, it has gone on to its next collective.

        Raises:
            Alarm: a rank has failed.
        """
        if pending.running is None:
            self.flush()
        assert pending.running is not None
        self._wait(pending.running)
        if not isinstance(pending.verb, AllGather) or pending.lengths is not None:
            return True
        pending.lengths = pending.running.out.view(np.int64).tolist()
        self.ledger.add(self.rank, pending.name, "AllGather", len(pending.payload), pending.lengths)
        pending.running = self._call(Call("gather", gets=tuple(pending.lengths)), pending.payload)
        return False

    def result(self, pending: Pending) -> Any:
        """What a verb that is done has brought, as the method expects it."""
        assert pending.running is not None
        verb, out = pending.verb, pending.running.out
        if isinstance(verb, AllGather):
            assert pending.lengths is not None
            return cut(out, pending.lengths)
        if isinstance(verb, AllToAll):
            return cut(out, verb.receives or [len(out) // self.world] * self.world)
        out = out[pending.start : pending.start + len(pending.payload)]
        return out.view(np.uint8) if isinstance(verb, Broadcast) else out

    def progress(self) -> None:
        """Let MPI work on what is under way; without a thread of its own it does so only when it is called."""
        if self._running:
            self._running[0].request.Get_status()

    def run(self, name: str, verb: Verb) -> Any:
        """A verb's result; waits."""
        pending = self.submit(name, verb)
        while not self.advance(pending):
            pass
        return self.result(pending)

    def gather_text(self, name: str, text: str) -> list[str]:
        """Every rank's text, in rank order; waits."""
        pieces = self.run(name, AllGather(np.frombuffer(text.encode(), np.uint8)))
        return [piece.tobytes().decode() for piece in pieces]

    # -- MPI ---------------------------------------------------------------------------------------------

    def _call(self, call: Call, payload: Array) -> Running:
        """Call MPI, and note what was called."""
        out: Array
        buffers: list[Any]
        if call.kind == "reduce":
            out = np.empty_like(payload)
            half = call.dtype == "float16"  # MPI has no such type: it carries 16 bits, and we add them
            buffers = [payload.view(np.uint16), out.view(np.uint16)] if half else [payload, out]
            request = self.comm.Iallreduce(buffers[0], buffers[1], _half(call.op) if half else OPS[call.op])
        else:
            out = np.empty(sum(call.gets), np.uint8)
            taken = [out, (call.gets, _starts(call.gets)), MPI.BYTE]
            if call.kind == "gather":
                buffers = [[payload, MPI.BYTE], taken]
                request = self.comm.Iallgatherv(*buffers)
            else:
                buffers = [[payload, (call.gives, _starts(call.gives)), MPI.BYTE], taken]
                request = self.comm.Ialltoallv(*buffers)
        self.calls.append(call)
        self._running.append(Running(request, out, buffers))
        return self._running[-1]

    def _wait(self, running: Running) -> None:
        if running.done:
            return
        began = time.perf_counter()
        first = MPI.Request.Waitany([running.request, self._alarm])
        self.ledger.add_seconds(self.rank, "communicate", time.perf_counter() - began)
        if first != 0:
            raise Alarm
        running.done = True
        self._running.remove(running)

    # -- failure -----------------------------------------------------------------------------------------

    def fail(self, error: Exception | None) -> Exception:
        """End the step on all ranks, one of which has failed; returns the error that all raise, the same everywhere.

        The rank that failed calls it with its error, and the others, which then meet an :class:`Alarm`, with None.
        Collectives cannot be taken back: each rank makes up, with zeros, for those that others have begun, so that none
        waits for ever and the next step finds all in order.
        """
        self._open.clear()  # nobody has been told of them
        alarms = []
        if error is not None:
            alarms = [self.side.Isend(b"", rank) for rank in range(self.world) if rank != self.rank]
        text = "" if error is None else str(error) or type(error).__name__
        everyone: list[tuple[str, list[Call]]] = self.side.allgather((text, self.calls))
        came = self._alarm == MPI.REQUEST_NULL
        for _ in range(sum(bool(text) for rank, (text, _) in enumerate(everyone) if rank != self.rank)):
            if not came:
                self._alarm.Wait()
            self._listen()
            came = False
        MPI.Request.Waitall(alarms)
        self._catch_up([calls for _, calls in everyone])
        return failure([text for text, _ in everyone])

    def _catch_up(self, everyone: Sequence[Sequence[Call]]) -> None:
        for number in range(len(self.calls), max(map(len, everyone))):
            there = {rank: calls[number] for rank, calls in enumerate(everyone) if number < len(calls)}
            call = next(iter(there.values()))
            payload: Array = np.zeros(call.size, call.dtype)
            if call.kind == "gather":
                payload = np.zeros(call.gets[self.rank], np.uint8)
            elif call.kind == "exchange":
                ranks = range(self.world)
                gives = tuple(there[r].gets[self.rank] if r in there else 0 for r in ranks)
                gets = tuple(there[r].gives[self.rank] if r in there else 0 for r in ranks)
                call, payload = call._replace(gives=gives, gets=gets), np.zeros(sum(gives), np.uint8)
            self._call(call, payload)
        MPI.Request.Waitall([running.request for running in self._running])
        self._running.clear()


def _kind(pending: Pending) -> tuple[str, str]:
    """What all-reduces must have alike to be one: type and operation."""
    return str(pending.payload.dtype), pending.verb.op if isinstance(pending.verb, AllReduce) else "sum"


OPS = {"sum": MPI.SUM, "max": MPI.MAX}


@cache
def _half(op: str) -> MPI.Op:
    """MPI's operation on float16, of which it knows nothing: rounded to float16 after each addition."""
    ufunc = {"sum": np.add, "max": np.maximum}[op]

    def combine(given: Any, total: Any, datatype: MPI.Datatype) -> None:
        a, b = np.frombuffer(given, np.float16), np.frombuffer(total, np.float16)
        ufunc(a, b, out=b)

    return MPI.Op.Create(combine, commute=True)


def _starts(lengths: Sequence[int]) -> tuple[int, ...]:
    return tuple(np.cumsum([0, *lengths[:-1]]).tolist())
