"""One rank's part in one step, from the first gradient to the state that is kept or dropped.

A driver makes a :class:`Step`, gives it gradients with :meth:`Step.add`, and calls :meth:`Step.finish`; or it has all
of them at once and calls :meth:`Step.run`. What differs between networks is a value: whether collectives go by order or
by name (``transport.ordered``), and when the ranks agree (:class:`Agree`).
"""

from __future__ import annotations

import contextlib
import json
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from enum import Enum
from math import isfinite
from typing import Any, NamedTuple

import numpy as np

import hvdcompress.ops
from hvdcompress.engine.agreement import JOIN, NUMBERS, PeerError, Status, Terms, compare_terms, failure
from hvdcompress.engine.collectives import Collectives, Pending
from hvdcompress.engine.commit import Outcome, conclude
from hvdcompress.engine.cosine import Comparison, Product
from hvdcompress.engine.exchange import Exchange, Stage
from hvdcompress.engine.safety import verify
from hvdcompress.engine.safety.alarm import everyones
from hvdcompress.engine.setup import Setup
from hvdcompress.engine.state import RankState, Turn
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


class Framework:
    """What the engine asks of a driver's framework; by default, numpy."""

    def ops(self, like: Array) -> Ops:
        """Return the array ops for gradients like this one."""
        return hvdcompress.ops.fast

    def store(self, exchange: Exchange) -> None:
        """Bring the results of an exchange from its ``outs`` to where the framework reads them."""

    def checksums(self, local: RankState) -> dict[str, int]:
        """Return the checksums that all ranks must have alike, in a step where the plan's ``verify_every`` says so."""
        return local.checksums()


class Passing(NamedTuple):
    """A gradient that the driver's framework reduces itself, in place."""

    turn: Turn
    gradient: Any


#: A decorator: numpy's settings for overflow, which belong to the program, do not apply to the engine
UNRAISED = np.errstate(all="ignore")


class ErrorsWait:
    """A context manager in which an error becomes the step's; one object, because it is entered often."""

    def __init__(self, step: Step):
        self.step = weakref.ref(step)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        step = self.step()
        if not isinstance(error, Exception) or step is None:
            return False
        step.fail(error)
        return True


class Step:
    """The exchanges of one step on one rank.

    Args:
        local: this rank's state.
        collectives: its network.
        terms: what all ranks must have alike.
        agree: when the ranks agree; None where the driver compares them itself.
        framework: what the driver does for the engine.

    Attributes:
        exchanges: by bucket name.
        loss_scale: what the loss was multiplied by; to be set before the first gradient.
        error: the first error of this rank that waits to be everyone's.
        factor: what sums over ranks are multiplied by: 1/world for an average; None until it is known.
        used: of each tensor in ``terms.tensors``, whether this rank had a gradient; None if all have. What no rank had
            keeps its state, since no rank uses the result. With ``Agree.FIRST_AND_LAST`` only.
        votes: numbers of this rank for the fallback, as many on all ranks, which go along with its last status.
        voted: the greatest of each of all ranks, when the step is over.
        checksums: of this rank, once its :meth:`status` was asked for in a step that compares them.
        errors_wait: in ``with step.errors_wait:`` an error waits for the ranks' agreement, which makes it everyone's.
        unused: tensors whose results no rank uses: they keep their state.
        finite: whether no rank had an Inf or a NaN, as far as this rank knows; it knows its own from :meth:`status` on.
    """

    def __init__(
        self,
        local: RankState,
        collectives: Collectives,
        terms: Terms,
        agree: Agree | None = None,
        framework: Framework = Framework(),  # noqa: B008  (it has no state)
    ):
        self.local = local
        self.collectives = collectives
        self.agree = agree
        self.framework = framework
        self.terms = replace(terms, plan={**terms.plan, "paused": True}) if local.paused else terms
        self.clip_norm = None if local.paused else local.plan.clip_norm
        self.votes = [] if local.uncompressed else local.fallback.votes()
        self.voted: list[float] = []
        self.loss_scale = 1.0
        self.exchanges: dict[str, Exchange] = {}
        self.error: Exception | None = None
        self.factor: float | None = None
        self.used: Sequence[bool] | None = None
        self.checksums: dict[str, int] = {}
        self.finite = True
        self.unused: set[str] = set()
        self.comparison = Comparison(local) if local.compares() else None
        self.triggered = False  # the ranks agreed to restart their schedules
        self._under_way: deque[Exchange] = deque()  # with a collective under way, oldest first
        self._done: list[Exchange] = []  # in stage REDUCED
        self._factors: dict[str, float] = {}  # what totals were multiplied by, by bucket
        self._passing: list[Passing] = []  # gradients that the framework reduces
        self._first: Pending | None = None  # the first status, until it is received
        self._told = ""  # what this rank said has failed
        self._asked = False  # this rank asks for a trigger
        self._flags: dict[Any, Flag] = {}  # whether gradients are finite, by their device
        self._polled = 0.0  # when poll() last looked
        self.errors_wait = ErrorsWait(self)

    # -- gradients come in ----------------------------------------------------------------------------------

    @UNRAISED
    def add(
        self,
        bucket: Bucket,
        indices: Sequence[int],
        gradients: Sequence[Array],
        outs: Sequence[Any] | None = None,
        may_carry: bool = False,
    ) -> Exchange | None:
        """Take gradients of a bucket; the last one starts the exchange.

        Args:
            bucket: the tensors that are exchanged in one go.
            indices: which of them.
            gradients: see :meth:`Exchange.add`.
            outs: see there, too.
            may_carry: a stock float32 all-reduce can carry the payload, if that is all there is to the exchange.

        Returns:
            The exchange if its payload is to be carried: the caller all-reduces ``exchange.collective.x`` and calls
            :meth:`receive_carried` with the result. Otherwise None.

        Raises:
            ExchangeError: the method failed on this rank.
            ValueError: the bucket had another shape before, or a gradient has another size than its tensor.
            PeerError: the ranks disagree, or another one failed before.
        """
        exchange = self.exchanges.get(bucket.spec.name)
        if exchange is None:
            like = gradients[0]
            ops = self.framework.ops(like)
            setup = Setup(self.local, self.collectives.group, bucket, like, ops, self.loss_scale)
            exchange = self.exchanges[bucket.spec.name] = Exchange(setup)
        if self.comparison:
            self.comparison.keep(exchange, indices, gradients)
        exchange.add(indices, gradients, outs)
        return self._start(exchange, may_carry) if exchange.is_full else None

    def _start(self, exchange: Exchange, may_carry: bool) -> Exchange | None:
        """Start the first collective of an exchange whose gradients are all there."""
        exchange.start()
        # A device is not asked here whether the gradient is finite: that would wait for it once for each bucket
        self._note(exchange.finite)
        if self.agree is Agree.FIRST_AND_LAST:
            self.receive_status()  # the status was under way while the first bucket was encoded
        carried = may_carry and exchange.setup.turn.carried_elements() is not None
        if exchange.stage is Stage.REDUCED:
            self._done.append(exchange)
        elif not carried:
            self._submit(exchange)
        # MPI moves data only inside of its calls, so the oldest collective is asked for while this rank encodes
        if self.collectives.ordered:
            self.collectives.progress(self._under_way)
        return exchange if carried else None

    @UNRAISED
    def fill_missing(self) -> None:
        """Start the exchanges that have some of their gradients; tensors without one count as zeros."""
        # Sorted, because every rank has to start them in one order, and gradients may have come in different ones
        for _, exchange in sorted(self.exchanges.items()):
            if exchange.stage is Stage.FILLING:
                exchange.fill_missing()
                self._start(exchange, may_carry=False)

    def pass_on(self, bucket: Bucket, gradient: Any, like: Array) -> None:
        """Note that the driver's framework reduces a gradient itself.

        Args:
            bucket: a bucket whose turn ``passes``.
            gradient: a tensor of PyTorch, which the framework reduces in place. It is filled with NaN if another tensor
                of the step is not finite.
            like: an array on its device.
        """
        turn = self.local.pass_on(bucket, like, self.framework.ops(like))
        self._passing.append(Passing(turn, gradient.detach()))

    @UNRAISED
    def look(self, gradient: Array) -> None:
        """Look for an Inf or a NaN in a gradient that was passed on, before :meth:`status`.

        A sum that contains NaN or Inf stays non-finite, so the gradient may already be in flight.
        """
        self._note(self.framework.ops(gradient).all_finite(gradient))

    @UNRAISED
    def receive_carried(self, exchange: Exchange, result: Array) -> None:
        """Go on with the payloads' sum, times :attr:`factor`, which the driver's own all-reduce has brought."""
        assert self.factor is not None
        self._deliver(exchange, exchange.resume_carried(result, self.factor))

    @UNRAISED
    def poll(self) -> None:
        """Resume exchanges whose results have come, oldest first, up to the first one that has not; do not wait.

        So second rounds overlap with gradients that are still to come. Not for transports that go by order. A call
        shortly after another one does nothing, as it would find nothing new.
        """
        # A hook is called for each of hundreds of gradients: asking Horovod each time would cost more than it brings
        now = time.perf_counter()
        if now - self._polled < PAUSE:
            return
        self._polled = now
        while self._under_way and self._is_there(self._under_way[0]):
            self._advance(self._under_way.popleft())
        self._deliver_done()

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Context manager in which gradients are added; at its end, exchanges of earlier batches are advanced.

        So second rounds overlap with the backward pass, too. For transports that go by order: every rank has the same
        batches.
        """
        before = len(self._under_way)
        yield
        self._advance_oldest(before)

    def fail(self, error: Exception) -> None:
        """Note an error of this rank, of which the others are told by the status. The first one counts."""
        self.error = self.error or error

    def waits_for(self) -> str:
        """Return what this rank waits for, in words; another thread may ask."""
        waiting = [exchange for exchange in list(self.exchanges.values()) if exchange.stage is Stage.RUNNING]
        if waiting:
            return waiting[0].where(len(waiting))
        if self._passing:
            name = self._passing[0].turn.bucket.spec.name
            more = len(self._passing) - 1
            return f"tensor {name!r} (method none, round 0{f', and {more} more' if more else ''})"
        return "the ranks' status"

    # -- the ranks agree ------------------------------------------------------------------------------------

    def status(self) -> Status:
        """Return how the step stands on this rank. A request for a trigger goes out with it."""
        self._asked |= self.local.take_request()
        steps = sorted(self.local.steps().items())
        self._ask_devices()
        # A rank with an error may not know its loss scale; its error is to be told, and not another scale
        scale = self.loss_scale if self.error is None else 1.0
        self.checksums = self.framework.checksums(self.local) if self.local.verifies() else {}
        state = self.terms.fingerprint(steps, self.checksums)
        return Status(self.error is not None, not self.finite, self._asked, self.local.replaced, state, scale)

    def send_status(self) -> None:
        """Tell all ranks how the step stands on this one, without waiting for them."""
        if self.agree is Agree.BEFORE_WAITING:
            with self.errors_wait:
                self._refuse_missing()
        self._told = "" if self.error is None else str(self.error) or type(self.error).__name__
        votes = self.votes if self.agree is Agree.BEFORE_WAITING else []
        self._first = self._tell(0, [*self.status().numbers(), *votes])

    def _tell(self, round: int, numbers: list[float]) -> Pending:
        return self.collectives.start("status", round, AllReduce(np.array(numbers, np.float64), "max"))

    @UNRAISED
    def receive_status(self) -> None:
        """Wait for the ranks' status and obey it, once after each :meth:`send_status`.

        Raises:
            PeerError: a rank failed, or ranks disagree; the same message on every rank.
        """
        pending = self._first
        self._first = None
        if pending is None:
            return
        self.collectives.advance(pending)
        numbers = self.collectives.result(pending).tolist()
        self.voted = numbers[NUMBERS:]
        status = Status.of(numbers[:NUMBERS])
        # First, because a rank that has joined gives zeros, which look like other terms, too
        if status.joined:
            raise PeerError(JOIN)
        if not status.alike:  # it also explains a failure: a rank may have met another plan's payload before this
            mine = json.dumps([self.terms.plan, self.terms.tensors, self.local.steps(), self.checksums])
            everyone = [json.loads(text) for text in self.collectives.gather_text("terms", mine)]
            compare_terms([(plan, tensors) for plan, tensors, *_ in everyone])
            if all(steps == everyone[0][2] for _, _, steps, _ in everyone):
                verify.compare([sums for *_, sums in everyone], self.local.steps_done())
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
            self.local.forget_lengths()

    # -- the end --------------------------------------------------------------------------------------------

    def run(self, add: Callable[[], object]) -> None:
        """Make the whole step, over a transport that goes by order and can sound an alarm.

        If it fails on any rank, it has no effect on any, and the next step can begin.

        Args:
            add: adds all gradients. It is not called if this rank has an :attr:`error`.

        Raises:
            PeerError: another rank failed, or ranks disagree.
            Exception: this rank failed.
        """
        mine = self.error  # the others are told by the status; an error that comes later sounds the alarm
        try:
            self.send_status()
            if mine is None:
                try:
                    add()
                except Exception:
                    self.receive_status()  # if ranks disagree, that is the cause, and comes first
                    raise
            self.finish()
        except Exception as caught:
            self.abandon()
            raised = everyones(self.collectives.transport, caught, mine)
            raise raised from raised.__cause__

    @UNRAISED
    def finish(self) -> None:
        """Bring every exchange to its end; keep the new state on all ranks, or drop it on all.

        Raises:
            PeerError: a rank failed, or ranks disagree; on every rank.
        """
        # The status is one collective more. Results that come meanwhile are taken, but nobody waits for one of them:
        # a rank that failed may never start its part
        while self.agree is Agree.BEFORE_WAITING and self._first and not self.collectives.ready(self._first):
            with self.errors_wait:
                self._go_on()
        self.receive_status()
        self._refuse_missing()
        self._drain()
        # Only now does this rank know whether its own gradients are finite: the first status came before them
        if self.agree is Agree.FIRST_AND_LAST:
            self._ask_devices()
            last = self._tell(1, [float(not self.finite), *self.votes, *map(float, self.used or ())])
            self.collectives.advance(last)
            non_finite, *others = self.collectives.result(last).tolist()
            self.voted, everyones_use = others[: len(self.votes)], others[len(self.votes) :]
            self.finite = not non_finite
            if self.used is not None:
                self.unused = {name for name, use in zip(self.terms.tensors, everyones_use, strict=True) if not use}
        self.start_comparison()
        self.finish_comparison()
        self.close()

    def start_comparison(self) -> None:
        """Start the all-reduces of uncompressed gradients, in a step in which the plan's ``cosine_every`` asks for it.

        Every rank does so at the same point: all exchanges are done, and all ranks know whether the step is finite.
        """
        if self.comparison and self.finite:
            self.comparison.start(self.collectives, self.exchanges.values())

    def finish_comparison(self) -> None:
        """Compare the results with the uncompressed average."""
        if self.comparison and self.finite:
            factor = self.local.world * (self.factor or 1.0 / self.local.world)
            norms = {passing.turn.bucket.spec.name: float(passing.gradient.norm()) for passing in self._passing}
            exact = {name: Product.exact(norm, factor) for name, norm in norms.items()}
            self.comparison.finish(self.collectives, exact, self.unused)

    def _refuse_missing(self) -> None:
        """Raise an error if an exchange waits for gradients that nobody will give, or the factor was not set."""
        for exchange in self.exchanges.values():
            if exchange.stage is Stage.FILLING:
                raise RuntimeError(f"{exchange.missing_in_words()}: give them, or call fill_missing()")
        if self.agree is Agree.FIRST_AND_LAST and self.exchanges and self.factor is None:
            raise RuntimeError("step.factor was not set: 1/world for an average, 1 for a sum")

    def _drain(self) -> None:
        """Wait for all exchanges: of transports that go by order round by round, of others whichever has come.

        Waiting for one tensor in particular would be a deadlock there: other ranks may wait for another one.
        """
        while self._under_way:
            if self.collectives.ordered:
                self._advance_oldest(len(self._under_way))
            else:
                self._go_on()
        self._deliver_done()

    @UNRAISED
    def close(self) -> None:
        """Commit: keep every new state or, if a rank had an Inf or a NaN, fill the results with NaN."""
        if self.finite and self.clip_norm is not None:
            self._clip(self.clip_norm)
        outcome = Outcome(self.finite, self.triggered, self.unused)
        conclude(self.local, self.exchanges.values(), [passing.turn for passing in self._passing], outcome)
        for exchange in self.exchanges.values():
            self.framework.store(exchange)
        if not self.finite:
            for passing in self._passing:
                passing.gradient.fill_(float("nan"))
            # As if the step had not been: the request waits for the next one
            self.local.asks_for_trigger |= self.triggered

    def abandon(self) -> None:
        """The step has failed: leave everything as it was before."""
        for exchange in self.exchanges.values():
            exchange.abandon()
            exchange.setup.memory.clear_scratch()  # a collective that was left alone may still write there
        # The status has carried the request, but no rank acts on it
        self.local.asks_for_trigger |= self._asked

    # -- inside ---------------------------------------------------------------------------------------------

    def _note(self, finite: Flag) -> None:
        """Note whether a gradient is finite; what a device knows is asked for with the status."""
        if isinstance(finite, bool):
            self.finite &= finite
        else:
            self._flags[finite.device] = both(self._flags.get(finite.device, True), finite)

    def _ask_devices(self) -> None:
        """Wait for devices to say whether gradients are finite: once a step."""
        self.finite &= all(map(bool, self._flags.values()))
        self._flags.clear()

    def _submit(self, exchange: Exchange) -> None:
        """Start the collective that an exchange waits for."""
        assert exchange.collective is not None
        equal = exchange.knows_lengths()
        exchange.pending = self.collectives.start(
            exchange.name, exchange.round, exchange.collective, exchange.setup.ops, exchange.x, equal
        )
        self._under_way.append(exchange)

    def _advance_oldest(self, count: int) -> None:
        """Wait for the collectives of the ``count`` oldest exchanges, in their order, and start the next ones.

        Results are written while those are under way. For transports that go by order: every rank calls this at the
        same points.
        """
        for _ in range(count):
            self._advance(self._under_way.popleft())
        self._deliver_done()

    def _advance(self, exchange: Exchange) -> None:
        """Wait for the collective of an exchange, give it the result, and start the next one."""
        assert exchange.pending is not None
        if not self.collectives.advance(exchange.pending):
            self._under_way.append(exchange)  # that was the lengths of an all-gather; now its payloads are under way
            return
        exchange.note_lengths(exchange.pending.lengths or ())
        result = self.collectives.result(exchange.pending)
        exchange.pending = None
        if exchange.resume(result) is None:
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
        """Write the results of an exchange; its new state waits for :meth:`close`."""
        self._factors[exchange.name] = factor
        if self.comparison:
            self.comparison.note_result(exchange, factor)
        exchange.deliver(factor, adapt=self.clip_norm is None)

    def _clip(self, limit: float) -> None:
        """Scale the averaged gradients of all tensors to the norm ``limit``, if theirs is larger.

        Momentum is adapted only after that, because the gradients that the optimizer is given have a larger norm.
        """
        norms = [exchange.norm() for exchange in self.exchanges.values()]
        norms += [float(passing.gradient.norm()) / self.loss_scale for passing in self._passing]
        norm = self.local.gradient_norm = float(np.linalg.norm(norms))
        factor = min(1.0, limit / (norm + 1e-6))
        for exchange in self.exchanges.values():
            exchange.clip(self._factors[exchange.name], factor)
        for passing in self._passing if factor < 1.0 else ():
            passing.gradient.mul_(factor)
