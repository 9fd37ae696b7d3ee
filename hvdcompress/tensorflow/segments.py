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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import isclose
from typing import Any

import numpy as np

from hvdcompress.engine.agreement import PeerError
from hvdcompress.engine.rank import Flight, Worker
from hvdcompress.engine.rehearsal import Round, lengths, round_of
from hvdcompress.loopback import cut
from hvdcompress.method import AllGather, AllToAll, Array, Broadcast, Verb
from hvdcompress.ops import fast
from hvdcompress.parts import wire
from hvdcompress.plan import Bucket

_MATHS = ctypes.util.find_library("m") if sys.platform == "linux" else None
_maths = ctypes.PyDLL(_MATHS) if _MATHS else None
_DEFAULT = ctypes.c_void_p(-1)  # C's FE_DFL_ENV, with glibc and musl

PROBE = 6  #: numbers in the probe: two to tell the operation, flags, and who failed


@contextmanager
def denormals_count() -> Iterator[None]:
    """Inside, numbers below 1.2e-38 are no zeros, which they are in TensorFlow's threads. Elsewhere than on Linux they
    stay so."""
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


class Segments:
    """The exchanges of one Compressor, by the names of their tensors.

    Args:
        worker: this rank's state and bookkeeping.
        loss_scale: returns the factor by which the loss was multiplied.
    """

    def __init__(self, worker: Worker, loss_scale: Callable[[], float]):
        self.worker, self.loss_scale = worker, loss_scale
        self.flights: dict[str, Flight] = {}
        self.errors: dict[str, Exception] = {}
        self.failure: PeerError | None = None
        self.together: dict[str, list[str]] = {}  # the tensors that are exchanged in one step with a tensor
        self._ended: Counter[str] = Counter()  # how often each tensor's exchange has ended, well or not
        self._since_failure: set[str] = set()
        self._asked = 0  # triggers that this rank asked for, and how many of them each tensor's probe has carried
        self._carried: dict[str, int] = {}
        self._lengths: dict[tuple[str, Round, int], int] = {}
        self._lock = threading.RLock()

    # -- the segments ---------------------------------------------------------------------------------

    def begin(self, bucket: Bucket, gradient: Array, rides: int | None) -> Array:
        """Start the exchange of a gradient [n]; returns this rank's probe [PROBE] float32, after the payload, of
        length ``rides``, if that goes along with the stock all-reduce."""
        with self._lock:
            name, p, rank = bucket.spec.name, self.worker.world, self.worker.rank
            self.errors.pop(name, None)
            finite, asks = True, False
            try:
                if self.failure:
                    raise self.failure
                scale = self.loss_scale()
                with np.errstate(over="ignore"):  # a float64 beyond float32 is Inf, and undoes the step as such
                    work = gradient.astype(self.worker.work_dtype(bucket), copy=False)
                self.flights[name] = flight = self.worker.start(bucket, work, fast, scale)
                finite = flight.finite
                asks = self._asks(flight)
            except Exception as error:
                self.errors[name] = error
            failed = float(name in self.errors)
            probe = [1.0 / p, (rank + 1.0) / p**2, float(not finite), float(asks), failed, failed * (rank + 1)]
            stock = np.array(probe, np.float32)
            if rides is not None:
                payload = np.zeros(rides, np.float32) if failed else flight.verb.x  # type: ignore[union-attr]
                stock = np.concatenate([payload, stock])
            self.worker.ledger.add(rank, name, "AllReduce", stock.nbytes)
            return stock

    def phase(self, bucket: Bucket) -> tuple[int, int]:
        """The stage and phase that are on in the bucket's step."""
        with self._lock:
            step = self.worker.steps.get(bucket.spec.name, 0)
            return bucket.program.stage(step), self.worker.phase_now(bucket)[0]

    def send(self, bucket: Bucket, number: int, planned: Round) -> list[Array]:
        """The payload of the exchange's next collective, which is its ``number``-th and as planned; for an
        all-to-all also how many bytes go to each rank."""
        with self._lock:
            name = bucket.spec.name
            flight = self.flights.get(name)
            try:
                if name in self.errors or flight is None or flight.verb is None:
                    raise self.errors.get(name) or RuntimeError(f"tensor {name!r} has no collective left to do")
                verb = flight.verb
                if (found := round_of(verb)) != planned:
                    raise RuntimeError(f"method {flight.method.id!r} asks for {found}, planned was {planned}")
                payload = self._outgoing(name, verb)
                self._lengths[name, planned, number] = len(payload)
            except Exception as error:
                self.errors[name] = error
                payload, verb = self._nothing(bucket, number, planned), None
            if planned.verb != "AllToAll":
                return [payload]
            splits = verb.splits if isinstance(verb, AllToAll) and verb.splits else None
            equal = [len(payload) // self.worker.world] * self.worker.world
            return [payload, np.array(splits or equal, np.int32)]

    def receive(self, bucket: Bucket, result: Array) -> None:
        """Go on with a collective's result."""
        with self._lock:
            name = bucket.spec.name
            if name in self.errors:
                return
            try:
                flight = self.flights[name]
                assert flight.verb is not None
                flight.advance(self._incoming(name, flight.verb, result))
            except Exception as error:
                self.errors[name] = error

    def finish(self, bucket: Bucket, probe: Array) -> Array:
        """Commit the step, if all ranks did well, and return the reduced gradient [n].

        Raises:
            PeerError: a rank failed, or the optimizer's operation is neither Average nor Sum.
        """
        with self._lock:
            name, spec = bucket.spec.name, bucket.spec
            flight = self.flights.pop(name, None)
            rode, probe = probe[:-PROBE], probe[-PROBE:]
            out = np.empty(spec.size, "float64" if spec.dtype == "float64" else "float32")
            error = self.errors.pop(name, None)
            try:
                factor = self._factor(probe)
                non_finite, triggered, failed, who = (value / factor for value in probe[2:])
                if error or failed > 0.5:
                    raise self._failed(name, error, failed, who)
            except PeerError as failure:
                self.failure = self.failure or failure
                out.fill(np.nan)
            else:
                assert flight is not None
                if flight.reduced is None:
                    factor = self.worker.take_ride(flight, rode, factor)
                if non_finite > 0.5:
                    self.worker.abandon(flight, [out], fast)
                else:
                    self._commit(flight, out, factor, triggered > 0.5)
            self._raise_at_the_end_of_a_step(name)
            return out

    def _commit(self, flight: Flight, out: Array, factor: float, triggered: bool) -> None:
        self.worker.finish(flight, [out], factor, fast)
        self._carried[flight.name] = flight.extra["asked"]
        if triggered:
            self.worker.trigger([flight.name])
        self.worker.ledger.steps = max(self.worker.steps.values())

    def _raise_at_the_end_of_a_step(self, name: str) -> None:
        """Raise what failed once no rank waits for another any more: all tensors of the step that ``name`` is of
        have ended equally often, or ``name`` is of the next step already."""
        self._ended[name] += 1
        if self.failure is None:
            return
        again = name in self._since_failure
        self._since_failure.add(name)
        if again or len({self._ended[other] for other in self.together.get(name, ())}) < 2:
            raise self.failure

    # -- inside ---------------------------------------------------------------------------------------

    def _asks(self, flight: Flight) -> bool:
        """Whether this tensor's probe carries a trigger; it does, for each request, until a step goes well."""
        self._asked += self.worker.take_request()
        flight.extra["asked"] = self._asked
        return self._carried.get(flight.name, 0) < self._asked

    def _outgoing(self, name: str, verb: Verb) -> Array:
        """A verb's payload as it goes into Horovod, charged to the ledger (a gather's when all lengths are known)."""
        ledger, rank = self.worker.ledger, self.worker.rank
        if isinstance(verb, Broadcast):  # as an int32 sum in which the others give zeros
            mine = rank == int(verb.root)
            payload = verb.make().view(np.int32) if mine else np.zeros(verb.num_bytes // 4, np.int32)
            ledger.add(rank, name, "Broadcast", payload.nbytes)
            return payload
        if not isinstance(verb, AllGather):
            ledger.add(rank, name, type(verb).__name__, verb.x.nbytes, splits=getattr(verb, "splits", None))
        return np.ascontiguousarray(verb.x)

    def _incoming(self, name: str, verb: Verb, result: Array) -> Any:
        """A collective's result as the method expects it."""
        p = self.worker.world
        if isinstance(verb, Broadcast):
            return result.view(np.uint8)
        if isinstance(verb, AllGather):
            own = len(verb.x)
            lengths = [own] * p if len(result) == own * p else wire.split(bytes(result), p)
            self.worker.ledger.add(self.worker.rank, name, "AllGather", own, lengths)
            return cut(result, lengths)
        if isinstance(verb, AllToAll):
            return cut(result, verb.receives or [len(result) // p] * p)
        return result

    def _nothing(self, bucket: Bucket, number: int, planned: Round) -> Array:
        """A payload of zeros, as long as the other ranks', for a rank that failed."""
        dtype = "int32" if planned.verb == "Broadcast" else planned.dtype
        length = 0 if planned.verb == "AllGather" else self._lengths.get((bucket.spec.name, planned, number))
        if length is None:
            method, (phase, _) = self.worker.method_now(bucket), self.worker.phase_now(bucket)
            with suppress(Exception):  # what failed here may fail there
                length = lengths(method, phase, self.worker.world, bucket.spec)[number] // (
                    4 if planned.verb == "Broadcast" else 1
                )
        return np.zeros(length or 0, dtype)

    def _factor(self, probe: Array) -> float:
        """1/p if the optimizer averages, 1 if it sums."""
        p = self.worker.world
        for factor in (1.0 / p, 1.0):
            if isclose(probe[0], factor, rel_tol=0.01) and isclose(probe[1], factor * (p + 1) / (2 * p), rel_tol=0.01):
                return factor
        raise PeerError("the optimizer's op must be hvd.Average or hvd.Sum; Min, Max, Product and Adasum are refused")

    def _failed(self, name: str, error: Exception | None, failed: float, who: float) -> PeerError:
        if isinstance(error, PeerError):
            return error
        rank, count, guilty = self.worker.rank, round(failed), round(who) - 1
        if count == 1 and guilty != rank:  # an error of this rank's, if there is one, came of it
            where = f"rank {guilty} failed, see its log"
        else:
            where = f"rank {rank}: {error}" if error else f"{count} ranks failed, see their logs"
        return PeerError(f"a gradient exchange failed, so every rank stops: tensor {name!r}: {where}")
