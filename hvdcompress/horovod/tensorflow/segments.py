"""The Python segments between the collectives of a TensorFlow graph: one rank's exchanges, cut into functions.

A segment takes arrays from the graph (a gradient, the result of a collective) and returns arrays (a payload, the
reduced gradient). Segments of different tensors run in any order and from several threads, but only one at a time.

A segment must not raise before its rank has taken part in every collective of the step: the other ranks would wait
forever. So an error is recorded, zeros are sent as payloads, and the last segment of the step raises the error. It does
so on every rank, because the probe carries an error flag. If the error happens after the first collective, it is too
late for the flag: this rank raises alone, and Horovod ends the others when it exits.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from hvdcompress.engine.agreement import PeerError
from hvdcompress.engine.collectives import Collectives
from hvdcompress.engine.commit import Part, commit_step
from hvdcompress.engine.exchange import Exchange
from hvdcompress.engine.lockstep import Round, lengths, round_of
from hvdcompress.engine.state import RankState
from hvdcompress.engine.transport import Group, Request, Transport
from hvdcompress.horovod.process_sets import factor_of
from hvdcompress.method import Array
from hvdcompress.ops import fast, pool
from hvdcompress.plan import Bucket

_LIBM = ctypes.util.find_library("m") if sys.platform == "linux" else None
_libm = ctypes.PyDLL(_LIBM) if _LIBM else None
_FE_DFL_ENV = ctypes.c_void_p(-1)  # the value of this macro in glibc and musl

_EMPTY = np.empty(0, np.float32)

PROBE = 6  #: elements of a probe: two that show the operation, three flags, and the rank that failed


@contextmanager
def with_denormals() -> Iterator[None]:
    """Context manager in which the CPU computes with denormal numbers; TensorFlow's threads flush them to zero.

    The numpy core must give the same bits in every driver. On systems other than Linux this does nothing.
    """
    if _libm is None:
        yield
        return
    before = ctypes.create_string_buffer(64)  # a fenv_t: 32 bytes on x86-64, 8 on aarch64
    _libm.fegetenv(before)
    _libm.fesetenv(_FE_DFL_ENV)
    try:
        yield
    finally:
        _libm.fesetenv(before)


@dataclass(eq=False)
class Traced:
    """The tensors that were traced in one outermost graph.

    Attributes:
        exchanged: names of the tensors that the engine exchanges.
        passing: buckets that the stock all-reduce reduces. The first gradient of a graph is never one of them, since
            its exchange tells the engine about the others.
        ended: how many exchanges of each tensor have ended in this graph, including failed ones.
        handles: by function that is traced, the names of its handles of the variables that count exchanges, by tensor.
    """

    exchanged: list[str] = field(default_factory=list)
    passing: list[Bucket] = field(default_factory=list)
    ended: Counter[str] = field(default_factory=Counter)
    handles: WeakKeyDictionary[Any, dict[str, str]] = field(default_factory=WeakKeyDictionary)


@dataclass
class _GraphTransport(Transport):
    """Transport whose collectives are nodes of the graph: segments pass on the payloads and the results."""

    rank: int
    world_size: int
    ordered = False
    native_broadcast = False
    variable_lengths = True
    shards_sums: tuple[str, ...] = ()

    def start(self, name: str, request: Request) -> Request:
        """Start nothing. The handle is the request, which the graph carries out."""
        return request


class Segments:
    """The exchanges of one Compressor, and the functions that the graph calls for them.

    Args:
        local: this rank's state.
        loss_scale: returns the factor by which the loss is multiplied.

    Attributes:
        exchanges: the open exchanges by tensor name.
        errors: errors of this rank by tensor name, until the end of the exchange.
        failure: the first error that all ranks know about; every later step raises it, too.
    """

    def __init__(self, local: RankState, loss_scale: Callable[[], float]):
        self.rank_state = local
        self.loss_scale = loss_scale
        self.group = Group(local.rank, local.world_size)
        self.collectives = Collectives(_GraphTransport(*self.group), local.observers)  # type: ignore[abstract]
        self.exchanges: dict[str, Exchange] = {}
        self.errors: dict[str, Exception] = {}
        self.failure: PeerError | None = None
        self._begun: Traced | None = None  # the graph of the current step
        self._since_failure: set[str] = set()  # names of tensors whose exchange has ended since the failure
        self._requested = 0  # number of triggers that this rank has requested
        self._requesting: dict[str, int] = {}  # by tensor name: their number when the probe of this step was made
        self._carried: dict[str, int] = {}  # by tensor name: number of requests that a finite step has carried
        self._lengths: dict[tuple[str, Round, int], int] = {}  # payload lengths of earlier steps
        self._lock = threading.RLock()

    # -- the segments ---------------------------------------------------------------------------------

    def begin(self, bucket: Bucket, gradient: Array, traced: Traced) -> Array:
        """Start the exchange of a gradient [n].

        Args:
            bucket: the tensor.
            gradient: its gradient, flat.
            traced: the graph of the gradient.

        Returns:
            The input of the stock all-reduce: the probe [PROBE] float32.
        """
        with self._lock:
            name = bucket.spec.name
            rank, p = self.group
            self.errors.pop(name, None)
            finite: Any = True
            requests = False
            try:
                if self.failure:
                    raise self.failure
                scale = self.loss_scale()
                if traced is not self._begun:
                    self._begun = traced
                    self.rank_state.begin_round()
                # A float64 value beyond the range of float32 becomes Inf, and the step is then treated as non-finite
                with np.errstate(over="ignore"):
                    vector = gradient.astype(self.rank_state.next_step(bucket).dtype, copy=False)
                exchange = Exchange(self.rank_state, self.group, bucket, vector, fast, scale)
                self.exchanges[name] = exchange
                exchange.add([0], [vector], [None])
                exchange.start()
                finite = exchange.finite
                requests = self._requests_trigger(exchange)
            except Exception as error:
                self.errors[name] = error
            failed = float(name in self.errors)
            flags = (float(not finite), float(requests), failed, failed * (rank + 1))
            probe = np.array([1.0 / p, (rank + 1.0) / p**2, *flags], np.float32)
            self.collectives.report(name, "AllReduce", probe, probe.nbytes)
            return probe

    def phase(self, bucket: Bucket) -> tuple[int, int]:
        """Return the plan's period and the method's phase in the current step of a bucket."""
        with self._lock:
            upcoming = self.rank_state.next_step(bucket)
            return bucket.program.period(upcoming.state.step if upcoming.state else 0), upcoming.phase

    def send(self, bucket: Bucket, number: int, planned: Round) -> list[Array]:
        """Return the payload of the next collective and, for an all-to-all, the number of bytes for each rank.

        Args:
            bucket: the tensor.
            number: index of the collective in this exchange.
            planned: the collective that the graph contains, as it was rehearsed.
        """
        with self._lock:
            name = bucket.spec.name
            exchange = self.exchanges.get(name)
            try:
                if name in self.errors or exchange is None or exchange.collective is None:
                    raise self.errors.get(name) or RuntimeError(
                        f"tensor {name!r}: the graph has collective {number}, but the method has no more collectives"
                    )
                collective = exchange.collective
                if (found := round_of(collective)) != planned:
                    raise RuntimeError(
                        f"tensor {name!r}: method {exchange.method.id!r} yields {found}, but {planned} in the "
                        "rehearsal: its collectives must not depend on the values of the gradient"
                    )
                exchange.pending = self.collectives.start(name, number, collective, like=_EMPTY)
                request = exchange.pending.handle
                payload = np.ascontiguousarray(request.payload)
                self._lengths[name, planned, number] = len(payload)
            except Exception as error:
                self.errors[name] = error
                return self._zeros(bucket, number, planned)
            return [payload, np.array(request.send_lengths, np.int32)] if request.send_lengths else [payload]

    def receive(self, bucket: Bucket, result: Array) -> None:
        """Give the result of a collective to the exchange of a bucket, and resume it."""
        with self._lock:
            name = bucket.spec.name
            if name in self.errors:
                return
            try:
                exchange = self.exchanges[name]
                assert exchange.pending is not None
                self.collectives.receive(exchange.pending, result)
                exchange.resume(exchange.pending.result)
            except Exception as error:
                self.errors[name] = error

    def between(self, bucket: Bucket, number: int, planned: Round, result: Array) -> list[Array]:
        """Give the result of a collective to the exchange of a bucket, and return the payload of the next one."""
        self.receive(bucket, result)
        return self.send(bucket, number, planned)

    def finish(self, bucket: Bucket, probe: Array, traced: Traced, passing: Sequence[Bucket] = ()) -> Array:
        """End the exchange of a bucket: commit its new state if no rank failed.

        Args:
            bucket: the tensor.
            probe: the result of the stock all-reduce.
            traced: the graph that runs.
            passing: buckets that the stock all-reduce reduces; not empty only for the first exchange of a graph. Their
                steps are counted if this exchange is committed.

        Returns:
            The reduced gradient [n]; NaN if a rank had a non-finite gradient, or failed.

        Raises:
            PeerError: a rank failed, or the optimizer's operation is neither Average nor Sum.
        """
        with self._lock:
            name = bucket.spec.name
            passed = [self._pass_on(other) for other in passing]
            exchange = self.exchanges.pop(name, None)
            error = self.errors.pop(name, None)
            try:
                factor = factor_of(probe, self.rank_state.world_size)
                non_finite, triggered, failed, failed_rank = (value / factor for value in probe[2:])
                if error or failed > 0.5:
                    raise self._failed(name, error, failed, failed_rank)
            except PeerError as failure:
                self.failure = self.failure or failure
                if exchange:
                    exchange.abandon()
                out = np.full(bucket.spec.size, np.nan, graph_dtype(bucket))
            else:
                assert exchange is not None
                out = pool.empty(bucket.spec.size, graph_dtype(bucket))
                exchange.outs = [out]
                finite = non_finite < 0.5
                if finite:
                    exchange.deliver(factor)
                commit_step(self.rank_state, [exchange, *passed], finite, triggered > 0.5, per_bucket=True)
                if finite:
                    self._carried[name] = self._requesting[name]
                    self.rank_state.ledger.steps = max(self.rank_state.ledger.steps, self.rank_state.states[name].step)
            self._raise_at_the_end_of_a_step(name, traced)
            return out

    def waits_for(self) -> str | None:
        """Describe the exchange that this rank waits for; return None if no exchange is open."""
        waiting = list(self.exchanges.values())
        return waiting[0].describe_wait(len(waiting)) if waiting else None

    def _pass_on(self, bucket: Bucket) -> Part:
        """Tell the engine that the stock all-reduce reduces a bucket."""
        self.collectives.report(bucket.spec.name, "AllReduce", None, 4 * bucket.spec.size)
        return Part(self.rank_state, bucket, _EMPTY, fast)

    def _raise_at_the_end_of_a_step(self, name: str, traced: Traced) -> None:
        """Raise the failure, if there is one, as soon as no rank waits for another one.

        This is the case when all exchanges of the graph have ended equally often, or when ``name`` ends for the second
        time since the failure, so that the next step has begun.
        """
        traced.ended[name] += 1
        if self.failure is None:
            return
        again = name in self._since_failure
        self._since_failure.add(name)
        if again or len({traced.ended[other] for other in traced.exchanged}) < 2:
            raise self.failure

    # -- payloads and results -------------------------------------------------------------------------

    def _requests_trigger(self, exchange: Exchange) -> bool:
        """Return whether this tensor's probe requests a trigger: for each request, until a finite step carries it."""
        self._requested += self.rank_state.take_trigger_request()
        self._requesting[exchange.name] = self._requested
        return self._carried.get(exchange.name, 0) < self._requested

    def _zeros(self, bucket: Bucket, number: int, planned: Round) -> list[Array]:
        """Return what :meth:`send` returns, with zeros as the payload, for a rank that has failed."""
        dtype = "int32" if planned.collective == "Broadcast" else planned.dtype
        length = 0 if planned.collective == "AllGather" else self._lengths.get((bucket.spec.name, planned, number))
        if length is None:
            upcoming = self.rank_state.next_step(bucket)
            with suppress(Exception):  # the rehearsal runs the method, which may fail again
                length = lengths(upcoming.method, upcoming.phase, self.group.world_size, bucket.spec)[number]
                length //= 4 if planned.collective == "Broadcast" else 1
        zeros = np.zeros(length or 0, dtype)
        p = self.group.world_size
        return [zeros, np.full(p, len(zeros) // p, np.int32)] if planned.collective == "AllToAll" else [zeros]

    def _failed(self, name: str, error: Exception | None, failed: float, failed_rank: float) -> PeerError:
        """Return the error of a failed exchange.

        Args:
            name: the tensor.
            error: the error of this rank, if it has one.
            failed: number of ranks that failed.
            failed_rank: sum of (rank + 1) over the ranks that failed.
        """
        if isinstance(error, PeerError):
            return error
        rank = self.group.rank
        count = round(failed)
        guilty = round(failed_rank) - 1
        if count == 1 and guilty != rank:  # an error of this rank is then only a consequence
            where = f"rank {guilty} failed, see its log"
        else:
            where = f"rank {rank}: {error}" if error else f"{count} ranks failed, see their logs"
        return PeerError(f"a gradient exchange failed, so every rank stops: tensor {name!r}: {where}")


def graph_dtype(bucket: Bucket) -> str:
    """Return the dtype of a bucket's gradient between the segments of the graph."""
    return "float64" if bucket.spec.dtype == "float64" else "float32"
