"""One rank's part in one step, from the first gradient to the state that is kept or dropped.

A driver makes a :class:`Step`, calls :meth:`Step.launch` for each bucket whose gradients are there, then
:meth:`Step.finish`. What differs between networks is a value: whether collectives go by order or by name
(``transport.ordered``), and when the ranks agree (:class:`Agree`).
"""

from __future__ import annotations

import json
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum
from math import isfinite
from typing import Any, NamedTuple

import numpy as np

from hvdcompress.engine.agreement import JOIN, PeerError, Status, Terms, compare_terms, failure
from hvdcompress.engine.collectives import Collectives, Pending
from hvdcompress.engine.exchange import Exchange
from hvdcompress.engine.rank import Rank
from hvdcompress.engine.safety import verify
from hvdcompress.engine.state import State
from hvdcompress.method import AllReduce, Array
from hvdcompress.ops.spec import Ops
from hvdcompress.ops.vectors import Flag, both
from hvdcompress.plan import Bucket

PAUSE = 5e-4  #: seconds; Horovod finishes collectives every millisecond, unless HOROVOD_CYCLE_TIME says otherwise


def loss_scale_now(loss_scale: float | Callable[[], float]) -> float:
    """Return the loss scale that is on now, of a number or a function.

    Raises:
        ValueError: it is not a positive finite number.
    """
    scale = float(loss_scale() if callable(loss_scale) else loss_scale)
    if not (isfinite(scale) and scale > 0):
        raise ValueError(f"loss_scale is {scale}; it must be a positive finite number")
    return scale


class Agree(Enum):
    """When the ranks tell each other how a step stands."""

    FIRST_AND_LAST = "before the first collective, and after the last"
    """Where collectives cannot be taken back and go by order: nothing is sent before all ranks have the same tensors,
    and no state is kept before all have come to the end."""
    BEFORE_WAITING = "when all exchanges are under way, before any is waited for"
    """Where collectives go by name: what was started under a name that not every rank uses is left alone."""


class Passing(NamedTuple):
    """A gradient that the driver's framework reduces itself, in place."""

    state: State
    gradient: Any


#: a decorator: what a program told numpy to do about overflow is not for our arithmetic, which looks itself
UNRAISED = np.errstate(all="ignore")


class ErrorsWait:
    """A context in which an error becomes the step's, until its ranks agree; one object, as it is entered often."""

    def __init__(self, step: Step):
        self.step = weakref.ref(step)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        step = self.step()
        if not isinstance(error, Exception) or step is None:
            return False
        step.error = step.error or error
        return True


class Step:
    """The exchanges of one step on one rank.

    Args:
        rank: this rank's state.
        collectives: its network.
        terms: what all ranks must have alike.
        loss_scale: what the loss was multiplied by.
        agree: when the ranks agree; None where the driver compares them itself.
        written: called at the end of the step when an exchange's results are in its ``outs``.
        checksums: returns those of what ranks must have alike, called where the plan's ``verify_every`` says so; by
            default those of the rank's shared state.

    Attributes:
        exchanges: by bucket name.
        error: the first error of this rank that waits to be everyone's.
        factor: what sums over ranks are multiplied by: 1/world for an average; None until it is known.
        checksums: of this rank, once its :meth:`status` was asked for in a step that compares them.
        errors_wait: in ``with step.errors_wait:`` an error waits for the ranks' agreement, which makes it everyone's.
        unused: tensors whose results nobody takes, on no rank: they keep their state.
        finite: whether no rank had an Inf or a NaN, as far as this rank knows; it knows its own from :meth:`status` on.
    """

    def __init__(
        self,
        rank: Rank,
        collectives: Collectives,
        terms: Terms,
        loss_scale: float = 1.0,
        agree: Agree | None = None,
        written: Callable[[Exchange], None] = lambda exchange: None,
        checksums: Callable[[], dict[str, int]] | None = None,
    ):
        self.rank, self.collectives, self.agree = rank, collectives, agree
        self.terms = replace(terms, plan={**terms.plan, "paused": True}) if rank.paused else terms
        self.clip_norm = None if rank.paused else rank.plan.clip_norm
        self.loss_scale, self.written = loss_scale, written
        self._make_checksums, self.checksums = checksums or rank.checksums, dict[str, int]()
        self.exchanges: dict[str, Exchange] = {}
        self.error: Exception | None = None
        self.factor: float | None = None
        self.finite = True
        self.unused: set[str] = set()
        self.triggered = False  # the ranks agreed to restart their schedules
        self._under_way: deque[Exchange] = deque()  # those with a collective under way, oldest first
        self._done: list[Exchange] = []  # those at their end, whose results have not been written
        self._factors: dict[str, float] = {}  # what totals were multiplied by, by bucket
        self._passing: list[Passing] = []  # gradients that the framework reduces
        self._first: Pending | None = None  # the first status, until it is heard
        self._told = ""  # what this rank said has failed
        self._asked = False  # this rank asks for a trigger
        self._flags: dict[Any, Flag] = {}  # whether gradients are finite, by their device
        self._polled = 0.0  # when poll() last looked
        self.errors_wait = ErrorsWait(self)

    # -- gradients come in ----------------------------------------------------------------------------------

    def launch(
        self, bucket: Bucket, members: Sequence[Array], outs: Sequence[Array], ops: Ops, piggyback: bool = False
    ) -> Exchange:
        """Start a bucket's exchange and its first collective; see :meth:`Rank.start` for the arguments.

        With ``piggyback`` the first collective is not started: the driver's own all-reduce carries the payload, and
        :meth:`receive_piggyback` gets the result.

        Raises:
            ExchangeError: the method failed on this rank.
            ValueError: the bucket had another shape before.
            PeerError: the ranks disagree, or another one failed before.
        """
        exchange = self.open(bucket, members[0], ops)
        self.receive(exchange, range(len(members)), members, outs)
        return self.begin(exchange, piggyback)

    def open(self, bucket: Bucket, like: Array, ops: Ops) -> Exchange:
        """Return the bucket's exchange, which waits for gradients; see :meth:`Rank.open`.

        Raises:
            ValueError: the bucket had another shape before.
        """
        exchange = self.exchanges.get(bucket.spec.name)
        if exchange is None:
            exchange = self.exchanges[bucket.spec.name] = self.rank.open(bucket, like, ops, self.loss_scale)
        return exchange

    @UNRAISED
    def receive(
        self,
        exchange: Exchange,
        places: Sequence[int],
        gradients: Sequence[Array],
        outs: Sequence[Array],
        clear: bool = False,
    ) -> None:
        """Take gradients soon after they are there, while they are in the cache; see :meth:`Rank.receive`."""
        self.rank.receive(exchange, places, gradients, outs, clear)
        if isinstance(exchange.finite, bool):  # else once for the bucket
            self.finite &= exchange.finite

    def pass_on(self, bucket: Bucket, gradient: Any, ops: Ops) -> None:
        """Note that the driver's framework reduces a gradient itself; see :meth:`Rank.pass_on`.

        Args:
            bucket: one that passes.
            gradient: a tensor of PyTorch, which the framework reduces in place. It is filled with NaN if another tensor
                of the step is not finite.
            ops: the array verbs of its library.
        """
        self._passing.append(Passing(self.rank.pass_on(bucket, gradient, ops), gradient.detach()))

    @UNRAISED
    def look(self, gradient: Array, ops: Ops) -> None:
        """Look for an Inf or a NaN in a gradient that was passed on, before :meth:`status`.

        What comes of one is one, too, so it may be reduced meanwhile.
        """
        self._note(ops.all_finite(gradient))

    @UNRAISED
    def begin(self, exchange: Exchange, piggyback: bool = False) -> Exchange:
        """Start the first collective of a bucket whose gradients are all there; see :meth:`launch`."""
        self.rank.begin(exchange)
        self._note(exchange.finite)
        if self.agree is Agree.FIRST_AND_LAST:
            self.hear()  # it was on its way while the first bucket was encoded
        if exchange.verb is None:
            self._done.append(exchange)
        elif not piggyback:
            self._submit(exchange)
        if self.collectives.ordered:
            self.collectives.progress(self._under_way)
        return exchange

    @UNRAISED
    def receive_piggyback(self, exchange: Exchange, result: Array, factor: float) -> None:
        """Go on with what the driver's own all-reduce brought: ``factor`` times the sum of the payloads."""
        self._deliver(exchange, self.rank.receive_piggyback(exchange, result, factor))

    @UNRAISED
    def poll(self) -> None:
        """Go on with what has come, oldest first and no further than the first that has not; waits for nothing.

        Second rounds so overlap with gradients that are still to come. Not for transports that go by order. A call
        shortly after another one does nothing, as it would find nothing new.
        """
        now = time.perf_counter()
        if now - self._polled < PAUSE:
            return
        self._polled = now
        while self._under_way and self._is_there(self._under_way[0]):
            self._advance(self._under_way.popleft())
        self._deliver_done()

    def waits_for(self) -> str:
        """What this rank waits for, in words; another thread may ask."""
        waiting = [exchange for exchange in list(self.exchanges.values()) if exchange.verb is not None]
        if waiting:
            return waiting[0].where(len(waiting))
        if self._passing:
            state, more = self._passing[0].state, len(self._passing) - 1
            return f"tensor {state.bucket.spec.name!r} (method none, round 0{f', and {more} more' if more else ''})"
        return "the ranks' status"

    @property
    def num_under_way(self) -> int:
        """Exchanges with a collective under way."""
        return len(self._under_way)

    # -- the ranks agree ------------------------------------------------------------------------------------

    def status(self) -> Status:
        """How the step stands on this rank. A request for a trigger goes out with it."""
        self._asked |= self.rank.take_request()
        steps = sorted(self.rank.steps().items())
        self._ask_devices()
        scale = self.loss_scale if self.error is None else 1.0
        self.checksums = self._make_checksums() if self.rank.verifies() else {}
        state = self.terms.fingerprint(steps, self.checksums)
        return Status(self.error is not None, not self.finite, self._asked, self.rank.replaced, state, scale)

    def say(self) -> None:
        """Tell all ranks how the step stands on this one; returns at once."""
        self._told = "" if self.error is None else str(self.error) or type(self.error).__name__
        self._first = self._tell(0, self.status().numbers())

    def _tell(self, round: int, numbers: list[float]) -> Pending:
        return self.collectives.start("status", round, AllReduce(np.array(numbers, np.float64), "max"))

    @UNRAISED
    def hear(self) -> None:
        """Wait for the ranks' status and obey it, once after each :meth:`say`.

        Raises:
            PeerError: a rank failed, or ranks disagree; the same message on every rank.
        """
        pending, self._first = self._first, None
        if pending is None:
            return
        self.collectives.advance(pending)
        status = Status.of(self.collectives.result(pending).tolist())
        if status.joined:
            raise PeerError(JOIN)
        if not status.alike:  # it also explains a failure: a rank may have met another plan's payload before this
            mine = json.dumps([self.terms.plan, self.terms.tensors, self.rank.steps(), self.checksums])
            everyone = [json.loads(text) for text in self.collectives.gather_text("terms", mine)]
            compare_terms([(plan, tensors) for plan, tensors, *_ in everyone])
            if all(steps == everyone[0][2] for _, _, steps, _ in everyone):
                verify.compare([sums for *_, sums in everyone], self.rank.steps_done())
        if status.failed:
            raise failure(self.collectives.gather_text("error", self._told)) from self.error
        if not status.agreed:
            status.explain()
        if self.error:
            raise self.error
        self.obey(status)

    def obey(self, status: Status) -> None:
        """Do in this step as all ranks do."""
        self.finite &= not status.non_finite
        self.triggered |= status.triggered
        if status.replaced:
            self.rank.forget_lengths()

    # -- the end --------------------------------------------------------------------------------------------

    @UNRAISED
    def finish(self, used: Sequence[bool] | None = None) -> None:
        """Bring every exchange to its end; keep the new state on all ranks, or drop it on all.

        Args:
            used: of each tensor in ``terms.tensors``, whether this rank had a gradient. What no rank had keeps its
                state, since its result is not used. None: all have. With ``Agree.FIRST_AND_LAST`` only.

        Raises:
            PeerError: a rank failed, or ranks disagree; on every rank.
        """
        while self.agree is Agree.BEFORE_WAITING and self._first and not self.collectives.ready(self._first):
            with self.errors_wait:
                self._go_on()
        self.hear()
        self.drain()
        if self.agree is Agree.FIRST_AND_LAST:
            self._ask_devices()
            last = self._tell(1, [float(not self.finite), *map(float, used or ())])
            self.collectives.advance(last)
            non_finite, *everyones = self.collectives.result(last)
            self.finite = not non_finite
            if used is not None:
                self.unused = {name for name, use in zip(self.terms.tensors, everyones, strict=True) if not use}
        self.close()

    @UNRAISED
    def drain(self) -> None:
        """Wait for all exchanges: of transports that go by order round by round, of others whichever has come.

        To wait for one tensor in particular would be a deadlock there: other ranks may wait for another one.
        """
        while self._under_way:
            if self.collectives.ordered:
                self.advance(len(self._under_way))
            else:
                self._go_on()
        self._deliver_done()

    @UNRAISED
    def advance(self, count: int) -> None:
        """Wait for the collectives of the ``count`` oldest exchanges under way, in their order, and start what follows.

        What has come to its end is written, while that is under way. For transports that go by order: every rank calls
        it at the same places.
        """
        for _ in range(count):
            self._advance(self._under_way.popleft())
        self._deliver_done()

    @UNRAISED
    def close(self) -> None:
        """Keep every exchange's new state; or, if a rank had an Inf or a NaN, drop it and fill results with NaN."""
        if self.finite and self.clip_norm is not None:
            self._clip(self.clip_norm)
        for exchange in self.exchanges.values():
            if self.finite:
                self.rank.commit(exchange, self.unused)
            else:
                self.rank.abandon(exchange)
            self.written(exchange)
        for passing in self._passing:
            if self.finite:
                self.rank.passed(passing.state)
            else:
                passing.gradient.fill_(float("nan"))
        if self.triggered and self.finite:
            self.rank.trigger()
        elif self.triggered:  # as if the step had not been: the request waits for the next one
            self.rank.asks_for_trigger = True

    def abandon(self) -> None:
        """The step has failed: leave everything as it was before."""
        for exchange in self.exchanges.values():
            self.rank.abandon(exchange, fill=False)
            exchange.state.clear_scratch()  # a collective that was left alone may still write there
        # ranks then know the same tensors: only some may have come as far as one that is new
        states = [
            *(exchange.state for exchange in self.exchanges.values()),
            *(passing.state for passing in self._passing),
        ]
        self.rank.forget([state.bucket.spec.name for state in states if state.step == 0])
        self.rank.asks_for_trigger |= self._asked

    # -- inside ---------------------------------------------------------------------------------------------

    def _note(self, finite: Flag) -> None:
        """Note whether a gradient is finite; one that a device knows is asked for with the status."""
        if isinstance(finite, bool):
            self.finite &= finite
        else:
            self._flags[finite.device] = both(self._flags.get(finite.device, True), finite)

    def _ask_devices(self) -> None:
        """Wait for devices to say whether gradients are finite: once a step."""
        self.finite &= all(map(bool, self._flags.values()))
        self._flags.clear()

    def _submit(self, exchange: Exchange) -> None:
        assert exchange.verb is not None
        name, like, equal = exchange.name, exchange.x, exchange.knows_lengths()
        exchange.pending = self.collectives.start(name, exchange.round, exchange.verb, exchange.ops, like, equal)
        self._under_way.append(exchange)

    def _advance(self, exchange: Exchange) -> None:
        """Give an exchange the result of its collective, which is waited for, and start the next one."""
        assert exchange.pending is not None
        if not self.collectives.advance(exchange.pending):
            self._under_way.append(exchange)
            return
        exchange.note_lengths(exchange.pending.lengths or ())
        result, exchange.pending = self.collectives.result(exchange.pending), None
        if exchange.advance(result) is None:
            self._done.append(exchange)
        else:
            self._submit(exchange)

    def _is_there(self, exchange: Exchange) -> bool:
        return exchange.pending is not None and self.collectives.ready(exchange.pending)

    def _go_on(self) -> None:
        """Advance one exchange whose result has come; if there is none, let the transport go on for a moment."""
        for number, exchange in enumerate(self._under_way):
            if self._is_there(exchange):
                del self._under_way[number]
                self._advance(exchange)
                self._deliver_done()
                return
        waiting = self._under_way[0].pending if self._under_way else self._first
        if waiting:
            self.collectives.idle(waiting)

    def _deliver_done(self) -> None:
        while self._done and self.factor is not None:
            self._deliver(self._done.pop(), self.factor)

    def _deliver(self, exchange: Exchange, factor: float) -> None:
        """Write an exchange's results; its state waits for :meth:`close`."""
        self._factors[exchange.name] = factor
        self.rank.deliver(exchange, factor, adapt=self.clip_norm is None)

    def _clip(self, limit: float) -> None:
        """Scale the averaged gradients of all tensors to the norm ``limit``, if theirs is larger.

        Only then the optimizer's momentum is adapted, as what the optimizer is handed has a larger norm.
        """
        norms = [self.rank.norm(exchange) for exchange in self.exchanges.values()]
        norms += [float(passing.gradient.norm()) / self.loss_scale for passing in self._passing]
        norm = self.rank.gradient_norm = float(np.linalg.norm(norms))
        factor = min(1.0, limit / (norm + 1e-6))
        for exchange in self.exchanges.values():
            self.rank.clip(exchange, self._factors[exchange.name], factor)
        for passing in self._passing if factor < 1.0 else ():
            passing.gradient.mul_(factor)
