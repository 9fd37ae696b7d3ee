"""What the TensorFlow driver runs between collectives: one rank's exchanges, cut into segments that a graph calls.

A segment takes arrays that the graph hands over (a gradient, a collective's result) and gives arrays back (a payload,
the reduced gradient). Segments of different tensors run in any order and from several threads, one at a time.

No segment raises before its rank has taken part in every collective of its step, as the others would wait for
ever: an error is noted, payloads of zeros are sent, and the last segment of the step's last tensor raises; on every
rank, since the flag of an error travels with the probe. (An error that happens after the first collective comes
too late for that: this rank raises alone, and the others end when it does.)
"""

from __future__ import annotations

import ctypes
import ctypes.util
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from hvdcompress.engine.agreement import PeerError, factor_of
from hvdcompress.engine.collectives import gathered_lengths, lift, lower
from hvdcompress.engine.commit import Outcome, commit_step
from hvdcompress.engine.exchange import Exchange, Stage
from hvdcompress.engine.rehearsal import Round, lengths, round_of
from hvdcompress.engine.setup import Setup
from hvdcompress.engine.state import NextStep, RankState
from hvdcompress.engine.telemetry.observer import Sent
from hvdcompress.engine.transport import Group
from hvdcompress.method import AllGather, AllToAll, Array, Broadcast, Collective
from hvdcompress.ops import fast, pool
from hvdcompress.plan import Bucket

_MATHS = ctypes.util.find_library("m") if sys.platform == "linux" else None
_maths = ctypes.PyDLL(_MATHS) if _MATHS else None
_DEFAULT = ctypes.c_void_p(-1)  # C's FE_DFL_ENV, with glibc and musl

_NOTHING = np.empty(0, np.float32)

PROBE = 6  #: numbers in the probe: two to tell the operation, flags, and who failed


@contextmanager
def denormals_count() -> Iterator[None]:
    """Inside, numbers below 1.2e-38 count; in TensorFlow's threads they are zero.

    On other systems than Linux it changes nothing.
    """
    if _maths is None:
        yield
        return
    before = ctypes.create_string_buffer(64)  # a fenv_t: 32 bytes on x86-64, 8 on aarch64
    _maths.fegetenv(before)
    _maths.fesetenv(_DEFAULT)
    try:
        yield
    finally:
        _maths.fesetenv(before)


class Traced:
    """What was traced in one outermost graph.

    Attributes:
        exchanged: the names of those whose exchange is ours.
        passing: the others, which TensorFlow hands to Horovod itself. The first gradient is never one of them: with
            its exchange the engine is told of theirs.
        ordinals: how many gradients have neither a variable nor a name, and are known by their ordinal.
        ended: how often each exchange has ended in this graph, well or not.
    """

    def __init__(self) -> None:
        self.exchanged: list[str] = []
        self.passing: list[Bucket] = []
        self.ordinals = 0
        self.ended: Counter[str] = Counter()


class Segments:
    """The exchanges of one Compressor, by the names of their tensors.

    Args:
        local: this rank's state.
        loss_scale: returns the factor by which the loss was multiplied.
    """

    def __init__(self, local: RankState, loss_scale: Callable[[], float]):
        self.local = local
        self.loss_scale = loss_scale
        self.group = Group(local.rank, local.world)
        self.exchanges: dict[str, Exchange] = {}
        self.errors: dict[str, Exception] = {}
        self.failure: PeerError | None = None
        self._begun: Traced | None = None  # the graph of the present step
        self._since_failure: set[str] = set()
        self._asked = 0  # triggers that this rank asked for, and how many of them each tensor's probe has carried
        self._asking: dict[str, int] = {}
        self._carried: dict[str, int] = {}
        self._lengths: dict[tuple[str, Round, int], int] = {}
        self._lock = threading.RLock()

    # -- the segments ---------------------------------------------------------------------------------

    def begin(
        self,
        bucket: Bucket,
        gradient: Array,
        piggyback: int | None,
        traced: Traced,
        refusal: Exception | None = None,
    ) -> Array:
        """Start the exchange of a gradient [n].

        Args:
            bucket: the tensor.
            gradient: its gradient, flat.
            piggyback: the payload's length, if the stock all-reduce carries it.
            traced: the graph that it is of.
            refusal: why the gradient must not be exchanged; None if it may be.

        Returns:
            What Horovod shall all-reduce: this rank's probe [PROBE] float32, after the payload if it goes along.
        """
        with self._lock:
            name = bucket.spec.name
            rank, p = self.group
            self.errors.pop(name, None)
            finite: Any = True
            asks = False
            try:
                if problem := self.failure or refusal:
                    raise problem
                scale = self.loss_scale()
                if traced is not self._begun:
                    self._begun = traced
                    self.local.begin_round()
                with np.errstate(over="ignore"):  # a float64 beyond float32 is Inf, and undoes the step as such
                    work = gradient.astype(self.local.next_step(bucket).dtype, copy=False)
                self.exchanges[name] = exchange = Exchange(Setup(self.local, self.group, bucket, work, fast, scale))
                exchange.add([0], [work], [None])
                exchange.start()
                finite = exchange.finite
                asks = self._asks(exchange)
            except Exception as error:
                self.errors[name] = error
            failed = float(name in self.errors)
            stock = pool.empty((piggyback or 0) + PROBE, np.float32)
            if piggyback is not None:
                stock[:piggyback] = 0 if failed else exchange.collective.x  # type: ignore[union-attr]
            flags = float(not finite), float(asks), failed, failed * (rank + 1)
            stock[-PROBE:] = 1.0 / p, (rank + 1.0) / p**2, *flags
            self._sent(name, Sent("AllReduce", stock if piggyback is None else stock[:piggyback], stock.nbytes))
            return stock

    def phase(self, bucket: Bucket) -> tuple[int, int]:
        """The stage and phase that are on in the bucket's step."""
        with self._lock:
            upcoming = self.local.next_step(bucket)
            return bucket.program.stage(upcoming.state.step if upcoming.state else 0), upcoming.phase

    def send(self, bucket: Bucket, number: int, planned: Round) -> list[Array]:
        """The payload of the exchange's next collective; of an all-to-all also how many bytes go to each rank.

        Args:
            bucket: the tensor.
            number: the number of the collective in this exchange.
            planned: what was rehearsed for it.
        """
        with self._lock:
            name = bucket.spec.name
            exchange = self.exchanges.get(name)
            try:
                if name in self.errors or exchange is None or exchange.collective is None:
                    raise self.errors.get(name) or RuntimeError(f"tensor {name!r} has no collective left to do")
                collective = exchange.collective
                if (found := round_of(collective)) != planned:
                    raise RuntimeError(f"method {exchange.setup.method.id!r} asks for {found}, planned was {planned}")
                payload, splits = self._outgoing(name, collective)
                self._lengths[name, planned, number] = len(payload)
            except Exception as error:
                self.errors[name] = error
                payload = self._nothing(bucket, number, planned)
                splits = None
            if planned.collective != "AllToAll":
                return [payload]
            equal = [len(payload) // self.local.world] * self.local.world
            return [payload, np.array(splits or equal, np.int32)]

    def receive(self, bucket: Bucket, result: Array) -> None:
        """Go on with a collective's result."""
        with self._lock:
            name = bucket.spec.name
            if name in self.errors:
                return
            try:
                exchange = self.exchanges[name]
                assert exchange.collective is not None
                exchange.resume(self._incoming(name, exchange.collective, result))
            except Exception as error:
                self.errors[name] = error

    def finish(self, bucket: Bucket, probe: Array, traced: Traced, passing: Sequence[Bucket] = ()) -> Array:
        """Commit the step, if all ranks did well, and return the reduced gradient [n].

        Args:
            bucket: the tensor.
            probe: what Horovod has all-reduced.
            traced: the graph that runs.
            passing: with the first tensor of a step, those whose gradients TensorFlow hands to Horovod itself: their
                steps count if its does.

        Raises:
            PeerError: a rank failed, or the optimizer's operation is neither Average nor Sum.
        """
        with self._lock:
            name = bucket.spec.name
            passed = [self._pass_on(other) for other in passing]
            exchange = self.exchanges.pop(name, None)
            error = self.errors.pop(name, None)
            payload = probe[:-PROBE]
            probe = probe[-PROBE:]
            try:
                factor = factor_of(probe, self.local.world)
                non_finite, triggered, failed, who = (value / factor for value in probe[2:])
                if error or failed > 0.5:
                    raise self._failed(name, error, failed, who)
            except PeerError as failure:
                self.failure = self.failure or failure
                if exchange:
                    exchange.abandon()
                out = np.full(bucket.spec.size, np.nan, _work(bucket))
            else:
                assert exchange is not None
                if exchange.stage is Stage.RUNNING:
                    factor = exchange.resume_carried(payload, factor)
                as_it_came = exchange.reduced[0].total is payload  # then it is the result, without a copy
                out = payload if as_it_came else pool.empty(bucket.spec.size, _work(bucket))
                exchange.outs = [out]
                finite = non_finite < 0.5
                if finite:
                    exchange.deliver(factor)
                commit_step(self.local, [exchange], passed, Outcome(finite, triggered > 0.5), per_bucket=True)
                if finite:
                    self._carried[name] = self._asking[name]
                    self.local.ledger.steps = max(self.local.ledger.steps, self.local.states[name].step)
            self._raise_at_the_end_of_a_step(name, traced)
            return out

    def waits_for(self) -> str | None:
        """What this rank waits for, in words; None where no exchange is under way."""
        waiting = list(self.exchanges.values())
        return waiting[0].describe_wait(len(waiting)) if waiting else None

    def _pass_on(self, bucket: Bucket) -> NextStep:
        """Note that TensorFlow hands a tensor's gradient to Horovod itself."""
        self._sent(bucket.spec.name, Sent("AllReduce", None, 4 * bucket.spec.size))
        return self.local.pass_through(bucket, _NOTHING, fast)

    def _raise_at_the_end_of_a_step(self, name: str, traced: Traced) -> None:
        """Raise what failed, once no rank waits for another any more.

        That is when all tensors of the graph have ended equally often in it, or when ``name`` is of the next step
        already.
        """
        traced.ended[name] += 1
        if self.failure is None:
            return
        again = name in self._since_failure
        self._since_failure.add(name)
        if again or len({traced.ended[other] for other in traced.exchanged}) < 2:
            raise self.failure

    # -- inside ---------------------------------------------------------------------------------------

    def _asks(self, exchange: Exchange) -> bool:
        """Whether this tensor's probe carries a trigger; it does, for each request, until a step goes well."""
        self._asked += self.local.take_trigger_request()
        self._asking[exchange.name] = self._asked
        return self._carried.get(exchange.name, 0) < self._asked

    def _outgoing(self, name: str, collective: Collective) -> tuple[Array, tuple[int, ...] | None]:
        """A collective's payload as it goes into Horovod, and of an all-to-all the bytes for each rank.

        Observers are told (of a gather when all lengths are known).
        """
        request = lower(collective, self.local.rank, self.local.world, fast, np.zeros(0))
        payload = np.ascontiguousarray(request.payload)
        if isinstance(collective, Broadcast):
            mine = self.local.rank == int(collective.root)
            self._sent(name, Sent("Broadcast", payload if mine else None, payload.nbytes))
        elif not isinstance(collective, AllGather):
            splits = collective.splits if isinstance(collective, AllToAll) else None
            self._sent(name, Sent(type(collective).__name__, collective.x, collective.x.nbytes, splits=splits))
        return payload, request.send_lengths

    def _incoming(self, name: str, collective: Collective, result: Array) -> Any:
        """A collective's result as the method expects it."""
        pieces: Sequence[int] = ()
        if isinstance(collective, AllGather):
            pieces = gathered_lengths(result, collective, self.local.world, fast)
            self._sent(name, Sent("AllGather", collective.x, len(collective.x), pieces))
        elif isinstance(collective, AllToAll):
            pieces = collective.receives or [len(result) // self.local.world] * self.local.world
        return lift(collective, result, pieces, fast)

    def _sent(self, name: str, what: Sent) -> None:
        for observer in self.local.observers:
            observer.sent(self.local.rank, name, what)

    def _nothing(self, bucket: Bucket, number: int, planned: Round) -> Array:
        """A payload of zeros, as long as the other ranks', for a rank that failed."""
        dtype = "int32" if planned.collective == "Broadcast" else planned.dtype
        length = 0 if planned.collective == "AllGather" else self._lengths.get((bucket.spec.name, planned, number))
        if length is None:
            upcoming = self.local.next_step(bucket)
            with suppress(Exception):  # what failed here may fail there
                length = lengths(upcoming.method, upcoming.phase, self.group.world, bucket.spec)[number]
                length //= 4 if planned.collective == "Broadcast" else 1
        return np.zeros(length or 0, dtype)

    def _failed(self, name: str, error: Exception | None, failed: float, who: float) -> PeerError:
        if isinstance(error, PeerError):
            return error
        rank = self.group.rank
        count = round(failed)
        guilty = round(who) - 1
        if count == 1 and guilty != rank:  # an error of this rank's, if there is one, came of it
            where = f"rank {guilty} failed, see its log"
        else:
            where = f"rank {rank}: {error}" if error else f"{count} ranks failed, see their logs"
        return PeerError(f"a gradient exchange failed, so every rank stops: tensor {name!r}: {where}")


def _work(bucket: Bucket) -> str:
    """The dtype that a bucket's gradient has in the graph."""
    return "float64" if bucket.spec.dtype == "float64" else "float32"
