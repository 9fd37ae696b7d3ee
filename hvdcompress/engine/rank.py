"""One rank's side of every exchange, without I/O: state, exchanges, and undoing a step.

:meth:`Rank.start` begins a bucket's exchange and runs the method to its first verb. Whoever carries verbs out
calls :meth:`Exchange.advance` with each result until ``reduced`` is there. :meth:`Rank.deliver` writes the
reduced gradient. Then :meth:`Rank.commit` keeps the new state, or :meth:`Rank.abandon` leaves everything as it was.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from hvdcompress.engine import handover
from hvdcompress.engine.exchange import Exchange
from hvdcompress.engine.safety import verify
from hvdcompress.engine.saving import snapshot
from hvdcompress.engine.state import Own, Pieces, State, declared_by_members, declared_slots, itemsize
from hvdcompress.engine.telemetry import log
from hvdcompress.engine.telemetry.ledger import Ledger
from hvdcompress.engine.telemetry.observer import Observer
from hvdcompress.engine.together import Together
from hvdcompress.method import Array, Broadcast, Context, Method, Slot, TensorSpec
from hvdcompress.ops.scan import NOTHING, Found
from hvdcompress.ops.spec import Ops
from hvdcompress.ops.vectors import FP16_MAX, Flag, Outer, Waves, both
from hvdcompress.parts import feedback, momentum
from hvdcompress.parts.momentum import Filter, Momentum
from hvdcompress.plan import Bucket, Plan
from hvdcompress.registry import get

UNCOMPRESSED = get("none")
SEEN = 10  #: steps, after which the tensors that have come are taken for all there are
LITTLE = 1 << 12  #: elements, on average: joined gradients of no more are looked at together, as calls cost more there
ENOUGH = 1 << 20  #: elements of gradients that are taken in together: as many as the processor's cache still holds


class Rank:
    """State and bookkeeping of one rank under one plan.

    Attributes:
        states: by bucket name, of every bucket that has gone through.
        observers: told of every event; the ledger is the first.
        asks_for_trigger: whether this rank asks all ranks to restart their methods' schedules.
        asking: buckets whose method has asked for that in its last exchange.
        paused: whether gradients are reduced uncompressed, and states stay as they are.
        round: the number of the step, which may consist of several of :class:`Step`; see :meth:`begin_round`.
        gradient_norm: the norm of all reduced gradients of the last step, before clipping; NaN if it was not measured.
        optimizer: returns the momentum that the optimizer applies to a tensor, by its name; None if that is not known.
    """

    def __init__(self, plan: Plan, rank: int, world: int, ledger: Ledger | None = None):
        self.plan, self.rank, self.world = plan, rank, world
        self.ledger = ledger or Ledger(world, rank)
        self.observers: list[Observer] = [self.ledger, *log.observers()]
        self.states: dict[str, State] = {}
        self.asks_for_trigger, self.asking = False, set[str]()
        self.paused, self.round, self._can_discard = False, 0, False
        self.replaced = False  # a state was, since all ranks last forgot lengths
        self.metrics: dict[str, tuple[float, float]] = {}  # metric -> least and greatest since the last trigger
        self.gradient_norm = float("nan")
        self.optimizer: Callable[[str], Momentum | None] = lambda name: None
        self._loaded: snapshot.Saved | None = None  # of tensors that have not come yet
        self._claimed_by = 0  # the round by which they should have come
        self._copy: snapshot.Copy = np.concatenate

    # -- where a bucket is in its program -------------------------------------------------------------------

    def step_of(self, bucket: Bucket) -> int:
        """The number of the bucket's next step."""
        state = self.states.get(bucket.spec.name)
        return state.step if state else 0

    def method_now(self, bucket: Bucket) -> Method:
        """The method of the bucket's next step."""
        return UNCOMPRESSED if self.paused else bucket.program.at(self.step_of(bucket))

    def phase_now(self, bucket: Bucket) -> tuple[int, int]:
        """The phase of the bucket's next step, and the step of its schedule's last restart."""
        state = self.states.get(bucket.spec.name)
        step, triggers, (seen, restart) = (state.step, state.triggers, state.restart) if state else (0, 0, (0, 0))
        restart = step if seen < triggers else restart
        if self.paused:
            return 0, restart
        return bucket.program.at(step).phase_of(step - max(bucket.program.since(step), restart)), restart

    def work_dtype(self, bucket: Bucket) -> str:
        """What the bucket is computed in: float32, or float64 for float64 gradients under a ``wide`` method."""
        return "float64" if bucket.spec.dtype == "float64" and self.method_now(bucket).wide else "float32"

    def piggyback(self, bucket: Bucket) -> int | None:
        """The length of the bucket's next payload if a stock float32 all-reduce can carry it; None if not."""
        method = self.method_now(bucket)
        never = type(method).piggyback is Method.piggyback
        if never or len(bucket.members) > 1 or self.work_dtype(bucket) != "float32":
            return None
        state = self.states.get(bucket.spec.name)
        phase, _ = self.phase_now(bucket)
        return method.piggyback(bucket.spec, phase, state.slots if state else {})

    # -- what ranks have alike ------------------------------------------------------------------------------

    def verifies(self) -> bool:
        """Whether ranks compare their checksums in the next step, the first included."""
        every = self.plan.verify_every
        return self.world > 1 and every > 0 and self.steps_done() % every == 0

    def steps_done(self) -> int:
        """The steps of the tensor that has done most."""
        return max(self.steps().values(), default=0)

    def checksums(self, host: verify.Host = np.asarray) -> dict[str, int]:
        """The checksums of the state that all ranks must have alike; ``host`` brings an array into numpy."""
        return verify.shared_slots(list(self.states.values()), host)

    # -- a gradient that is exchanged as it is --------------------------------------------------------------

    def passes(self, bucket: Bucket) -> bool:
        """Whether a stock float32 all-reduce of the gradient itself is the bucket's next exchange."""
        method = self.method_now(bucket)
        alone = len(bucket.members) == 1 and bucket.spec.dtype == "float32"
        state = self.states.get(bucket.spec.name)
        cancelled = state is not None and bool(state.momentum)  # there is something to take back once more
        return method.passes and method.feedback == "none" and alone and not cancelled

    def pass_on(self, bucket: Bucket, like: Any, ops: Ops) -> State:
        """Note that the driver's framework reduces a gradient; returns its state.

        Args:
            bucket: one that :meth:`passes`.
            like: an array on its device.
            ops: the array verbs of its library.
        """
        state = self._state(bucket, like, ops)
        self._forget_undo(state)
        for observer in self.observers:
            observer.begun(self.rank, bucket.spec.name, bucket.spec.size * itemsize(bucket.spec.dtype))
        return state

    def passed(self, state: State) -> None:
        """A gradient that was passed on has been reduced, and the step is good."""
        if not self.paused:
            state.undo = state.remember(self.round)
            if state.restart[0] < state.triggers:
                state.restart = state.triggers, state.step
            state.step += 1
        for observer in self.observers:
            observer.committed(self.rank, state.bucket.spec.name, {})

    # -- one exchange ---------------------------------------------------------------------------------------

    def start(
        self, bucket: Bucket, members: Sequence[Array], outs: Sequence[Array | None], ops: Ops, loss_scale: float = 1.0
    ) -> Exchange:
        """Begin a bucket's exchange and run it to its first verb: :meth:`open`, :meth:`receive` each, :meth:`begin`.

        Args:
            bucket: what is exchanged.
            members: its tensors' flat gradients in the working dtype; read only, until :meth:`deliver`.
            outs: the flat arrays that receive the reduced gradients; may be ``members`` themselves. None where the
                driver puts one into ``Exchange.outs`` before :meth:`deliver`.
            ops: the array verbs of their library.
            loss_scale: what the loss was multiplied by; residuals are kept unscaled.

        Raises:
            ExchangeError: the method failed.
            ValueError: the bucket had another shape before.
        """
        exchange = self.open(bucket, members[0], ops, loss_scale)
        self.receive(exchange, range(len(bucket.members)), members, outs)
        self.begin(exchange)
        return exchange

    def open(self, bucket: Bucket, like: Array, ops: Ops, loss_scale: float = 1.0) -> Exchange:
        """Make ready for a bucket's gradients; ``like``: an array on their device.

        Raises:
            ValueError: the bucket had another shape before.
        """
        state = self._state(bucket, like, ops)
        self._forget_undo(state)
        spec, method, (phase, restart) = bucket.spec, self.method_now(bucket), self.phase_now(bucket)
        for observer in self.observers:
            observer.begun(self.rank, spec.name, spec.size * itemsize(spec.dtype))
        # what is kept between steps is kept unscaled; a method that keeps nothing need not unscale
        scale = 1.0 / loss_scale if loss_scale != 1.0 and feedback.slots(method, spec) else 1.0
        spare, state.spare = state.spare, {}
        for slot in feedback.names(method):
            if slot not in spare:
                spare[slot] = ops.zeros(spec.size, "float32", like=like)
        with_feedback, count = method.feedback != "none", len(bucket.members)
        ctx = Context(
            self.rank,
            self.world,
            state.step,
            spec,
            self.plan.seed,
            phase,
            state.triggers,
            needs_own=with_feedback,
            scratch=state.scratch,
            state=state.slots,
            scanned=[Found(True)] * count,
        )
        contexts, on_device = [], not isinstance(like, np.ndarray)
        if bucket.apart(method) and not method.elementwise:
            contexts = [
                replace(
                    ctx,
                    spec=member,
                    scratch=own.scratch,
                    group=(ctx, start),
                    state=own.slots,
                    scanned=[Found(True)],
                    counters={},
                )
                for member, own, (start, _) in zip(bucket.members, state.members, bucket.spans, strict=True)
            ]
        dtype, acted = self.work_dtype(bucket), (state.triggers, restart)
        exchange = Exchange(self.worked, self.answered, state, method, ctx, contexts, ops, dtype, scale, spare, acted)
        exchange.outs, exchange.cleared = [None] * count, [False] * count
        exchange.paused, exchange.begun_in = self.paused, self.round
        if contexts:
            buffer = functools.partial(ctx.buffer, ops=ops, like=like)
            names = [member.name for member in bucket.members]
            exchange.communication = Together(names, self.rank, self.world, ops, buffer)
        if with_feedback:
            exchange.x = spare[feedback.RESIDUAL]
        little = method.passes and not with_feedback and spec.size < LITTLE * count
        if count > 1 and not contexts and (on_device or little) and method.local_clip_norm is None:
            exchange.waiting = [None] * count
        return exchange

    def receive(
        self,
        exchange: Exchange,
        places: Sequence[int],
        gradients: Sequence[Array],
        outs: Sequence[Array | None],
        clear: bool = False,
    ) -> None:
        """Take gradients of a bucket's members, in any order: the one pass over memory that each of them makes.

        Those of a joined bucket wait for each other on a device, and on the host if they are small.

        A gradient with an Inf or a NaN takes part as zeros, so that no method ever sees one, and marks the exchange:
        the step is to be abandoned.

        Args:
            exchange: the bucket's.
            places: which members.
            gradients: their flat gradients in the working dtype; read only, until :meth:`deliver`, except that on a
                device one with an Inf or a NaN may be set to 0.
            outs: the flat arrays that receive the reduced gradients; may be ``gradients`` themselves.
            clear: ``outs`` are ``gradients`` themselves, and may be set to 0 in passing, which is faster than later.

        Raises:
            ValueError: one has not as many elements as the member.
        """
        began, spans = time.perf_counter(), [exchange.bucket.spans[place] for place in places]
        with_feedback = exchange.method.feedback != "none"
        clear &= exchange.method.sparse and with_feedback
        for place, gradient, out, (start, stop) in zip(places, gradients, outs, spans, strict=True):
            if len(gradient) != stop - start:
                name = exchange.bucket.members[place].name
                raise ValueError(f"tensor {name!r} has {stop - start} elements, {len(gradient)} came")
            exchange.outs[place], exchange.cleared[place] = out, clear and exchange.waiting is None
        if exchange.waiting is not None:
            for place, gradient in zip(places, gradients, strict=True):
                exchange.waiting[place] = gradient
            return
        if with_feedback and not exchange.contexts:
            founds = self._accumulate(exchange, gradients, places, spans, exchange.ctx, clear)
            for place, found in zip(places, founds, strict=True):
                self._note(exchange, exchange.ctx, place, found)
        else:
            for place, gradient, span in zip(places, gradients, spans, strict=True):
                self._receive_alone(exchange, place, gradient, span, clear)
        self.worked(exchange.name, time.perf_counter() - began, last=False)

    def _receive_alone(
        self, exchange: Exchange, place: int, gradient: Array, span: tuple[int, int], clear: bool
    ) -> None:
        """Take a gradient that its method runs on by itself, or that has no residual."""
        # which part of what the method sees it is: a method that runs on each tensor sees no other
        ctx, part = (exchange.contexts[place], 0) if exchange.contexts else (exchange.ctx, place)
        x, found = self._added(exchange, gradient, span, ctx, part, clear)
        self._note(exchange, ctx, part, found)
        if exchange.contexts:
            self._take_out(exchange, found.finite, x, slice(*span))
            self._begin_member(exchange, place, x, slice(*span))
        if exchange.method.feedback == "none":
            # of several, what is sent has been made of each, by its method or in passing; or they are joined
            if len(exchange.outs) == 1 or exchange.contexts or found.saturated is not None:
                exchange.x = x
            else:
                if exchange.x is None:
                    exchange.x = self._joined(exchange, gradient)
                exchange.ops.write(exchange.x[slice(*span)], x, 1.0)

    def _note(self, exchange: Exchange, ctx: Context, part: int, found: Found) -> None:
        """Note what was found in a gradient."""
        assert ctx.scanned is not None
        ctx.scanned[part], exchange.finite = found, both(exchange.finite, found.finite)

    def _receive_waiting(self, exchange: Exchange) -> None:
        """Take the gradients of a joined bucket that have waited for each other."""
        assert exchange.waiting is not None
        began, gradients = time.perf_counter(), [gradient for gradient in exchange.waiting if gradient is not None]
        on_host = isinstance(gradients[0], np.ndarray)
        buffer = self._joined(exchange, gradients[0]) if on_host else None
        gradient = exchange.ops.concat(gradients, buffer)
        exchange.x, found = self._added(exchange, gradient, (0, len(gradient)), exchange.ctx, None, False)
        exchange.finite, exchange.waiting = found.finite, None
        self.worked(exchange.name, time.perf_counter() - began, last=False)

    def _accumulate(
        self,
        exchange: Exchange,
        gradients: Sequence[Array],
        places: Sequence[int] | None,
        spans: Sequence[tuple[int, int]],
        ctx: Context,
        clear: bool,
    ) -> list[Found]:
        slots, spare = exchange.state.slots, exchange.spare
        given = exchange.method, gradients, exchange.scale, places, spans, slots, spare, ctx, exchange.ops, clear
        return feedback.receive(*given)

    def _added(
        self, exchange: Exchange, gradient: Array, span: tuple[int, int], ctx: Context, part: int | None, clear: bool
    ) -> tuple[Array, Found]:
        """What the method sees of a gradient, and what was found in the pass; ``part``: None of several together."""
        method, ops = exchange.method, exchange.ops
        if method.feedback != "none":
            (found,) = self._accumulate(exchange, [gradient], None if part is None else [part], [span], ctx, clear)
            return exchange.spare[feedback.RESIDUAL][slice(*span)], found
        # of a gradient that is multiplied afterwards, nothing is known by looking at it
        scan = NOTHING if part is None or exchange.scale != 1.0 else method.scan(part, ctx, ops, gradient)
        found = ops.look(gradient, scan)
        if found.finite is False:
            gradient = ops.zeros(len(gradient), exchange.dtype, like=gradient)
            found = ops.look(gradient, scan)._replace(finite=False)
        return gradient if exchange.scale == 1.0 else gradient * np.float32(exchange.scale), found

    def _take_out(self, exchange: Exchange, finite: Flag, x: Array, span: slice) -> None:
        """Take gradients out of x that are not finite, where only a device knows whether they are."""
        if not isinstance(finite, bool):
            residual = exchange.state.slots[feedback.RESIDUAL][span] if exchange.method.feedback != "none" else None
            exchange.ops.keep_if(finite, x, residual)

    def _begin_member(self, exchange: Exchange, place: int, x: Array, span: slice) -> None:
        """Run the method on one of the tensors that are exchanged together, to its first verb."""
        method, together, ctx = exchange.method, exchange.communication, exchange.contexts[place]
        assert isinstance(together, Together)
        spare = {slot: exchange.spare[slot][span] for slot in feedback.names(method)}
        state = {slot: exchange.state.slots[slot][span] for slot in spare}
        try:
            together.begin(place, feedback.exchange(method, x, {**ctx.state, **state}, spare, ctx, exchange.ops))
        except Exception as error:
            raise exchange.failed(error) from error

    def begin(self, exchange: Exchange) -> None:
        """Run the exchange to its first verb; all gradients are there.

        Raises:
            ExchangeError: the method failed.
        """
        if exchange.waiting is not None:
            self._receive_waiting(exchange)
        assert exchange.x is not None
        if not exchange.contexts:
            self._take_out(exchange, exchange.finite, exchange.x, slice(None))
            slots, spare, ctx = exchange.state.slots, exchange.spare, exchange.ctx
            exchange.communication = feedback.exchange(exchange.method, exchange.x, slots, spare, ctx, exchange.ops)
        exchange.advance()

    def receive_piggyback(self, exchange: Exchange, result: Array, factor: float) -> float:
        """Go on with what a stock all-reduce brought, ``factor`` times the sum; the factor that is left to apply."""
        if exchange.method.linear:
            exchange.advance(result)
            return 1.0
        exchange.advance(result * np.float32(1.0 / factor))
        return factor

    def deliver(self, exchange: Exchange, factor: float, adapt: bool = True) -> None:
        """Write the reduced gradients, ``factor`` times the totals, into the exchange's ``outs``.

        With ``adapt``, the optimizer's momentum is adapted where the method says so.
        """
        began, state = time.perf_counter(), exchange.state
        limited = exchange.bucket.spec.dtype == "float16" and exchange.method.feedback != "none"
        outs, cleared = exchange.outs, exchange.cleared
        if limited:
            exchange.outs = [exchange.ops.zeros(len(out), "float32", like=out) for out in outs if out is not None]
            exchange.cleared = [True] * len(outs)
        filters = self._filters(exchange) if adapt else []
        exchange.momentum = state.momentum
        if filters:
            kept = handover.hand_over(exchange, factor, filters, state.momentum, state.before)
            exchange.momentum = kept if filters[0].keeps else ()
        else:
            self._write(exchange, factor)
        if limited:
            results, exchange.outs, exchange.cleared = exchange.outs, outs, cleared
            self._limit(exchange, results, exchange.scale / (factor * self.world))
        self.worked(exchange.name, time.perf_counter() - began, last=True)

    def _limit(self, exchange: Exchange, results: Sequence[Array], share: float) -> None:
        """Write results into ``outs`` of float16; what those cannot hold is for the residuals of all ranks.

        Sums over steps can be larger than any gradient.

        Args:
            exchange: whose results they are.
            results: float32, by member.
            share: what a result is multiplied by to get each rank's share of it, the loss scale apart.
        """
        ops = exchange.ops
        exchange.over.clear()
        for number, (result, out) in enumerate(zip(results, exchange.outs, strict=True)):
            limited = ops.scaled(result, 1.0, FP16_MAX)
            # a device is not waited for
            if not isinstance(result, np.ndarray) or ops.max_abs(result) > FP16_MAX:
                exchange.over[number] = (result - limited) * np.float32(share).item()
            ops.write(out, limited, 1.0)

    def norm(self, exchange: Exchange) -> float:
        """Return the norm of the exchange's reduced gradients, the loss scale apart, while they are in its ``outs``."""
        norms = [exchange.ops.l2_norm(out) for out in exchange.outs]
        return float(np.linalg.norm(norms)) * exchange.scale

    def measured_norm(self) -> float:
        """Return :attr:`gradient_norm`.

        Raises:
            RuntimeError: the plan has no ``clip_norm``.
        """
        if self.plan.clip_norm is None:
            raise RuntimeError("norms are measured where the plan has clip_norm; inf measures without clipping")
        return self.gradient_norm

    def clip(self, exchange: Exchange, factor: float, clipping: float) -> None:
        """Multiply the reduced gradients by ``clipping``, and adapt the optimizer's momentum.

        ``factor`` is what :meth:`deliver` was called with, without ``adapt``.
        """
        if momentum.adapts(exchange.method) or exchange.state.momentum:
            exchange.cleared = [False] * len(exchange.outs)
            self.deliver(exchange, factor * clipping)
        elif clipping < 1.0:
            for out in exchange.outs:
                exchange.ops.write(out, out, clipping)

    def _write(self, exchange: Exchange, factor: float) -> None:
        assert exchange.reduced is not None
        ops, total, factor = exchange.ops, exchange.reduced[0].total, factor / exchange.scale
        if len(exchange.reduced) == len(exchange.outs):
            for out, reduced, cleared in zip(exchange.outs, exchange.reduced, exchange.cleared, strict=True):
                if out is not reduced.total or factor != 1.0:  # else the driver's own all-reduce has written it
                    ops.write(out, reduced.total, factor, cleared)
        else:
            if isinstance(total, Outer | Waves):  # they cannot be cut
                lazy, like = total, exchange.outs[0]
                total = exchange.ctx.buffer("total", exchange.bucket.spec.size, "float32", ops, like)
                ops.write(total, lazy, 1.0)
            ops.write_parts(exchange.outs, total, factor, exchange.cleared)

    def _filters(self, exchange: Exchange) -> list[Filter]:
        """Return the coefficients that adapt the momentum of each member; none where nothing is to be done."""
        state, adapts = exchange.state, momentum.adapts(exchange.method)
        exchange.updates = state.updates
        if not (adapts or state.momentum):
            return []
        found = [self.optimizer(member.name) for member in exchange.bucket.members]
        if not any(found):  # no optimizer is known, or it is gone
            state.momentum = ()
        if not any(each and each.factor for each in found):
            return []
        exchange.updates = tuple(each.updates if each else None for each in found)
        self._reconcile(exchange, found)
        if exchange.paused:
            return []
        if adapts:
            return [momentum.adapting(exchange.method, each) for each in found]
        return [momentum.releasing(each) for each in found] if state.momentum else []

    def _reconcile(self, exchange: Exchange, found: Sequence[Momentum | None]) -> None:
        """Bring ``State.momentum`` to what is in the buffers of optimizers.

        Some are new; some have skipped their step; some have taken a step with a gradient that is not in it.
        """
        state, numbers = exchange.state, range(len(found))
        then = state.updates or (None,) * len(found)
        foreign = state.foreign or (False,) * len(found)
        # updates since the last exchange in which nothing of ours was added to the buffer; −1: not even that was
        more: list[int] = []
        for number in numbers:
            before, now = then[number], exchange.updates[number]
            more.append(0 if before is None or now is None else now - before - (not foreign[number]))
        empty = [one is not None and one.empty for one in found]
        changes: list[tuple[Sequence[bool], Pieces]] = [([each < 0 for each in more], state.before), (empty, ())]
        factors = [one.factor ** more[number] if one and more[number] > 0 else 1.0 for number, one in enumerate(found)]
        for factor in set(factors) - {1.0}:
            changes.append(([each == factor for each in factors], handover.scaled(state.momentum, factor)))
        for tensors, content in changes:
            if any(tensors):
                given = state.momentum, content, tensors, exchange.bucket, exchange.ops, exchange.outs[0]
                state.momentum, state.before = handover.with_parts_of(*given), state.momentum
                state.updates = ()

    def commit(self, exchange: Exchange, unused: Collection[str] = ()) -> None:
        """Keep the exchange's new state; of ``unused`` tensors, whose results nobody takes, what feedback had kept."""
        assert exchange.reduced is not None
        state, old, spare = exchange.state, exchange.state.slots, exchange.spare
        counters = exchange.ctx.counters
        if exchange.paused:
            state.spare, state.updates = spare, exchange.updates
            state.foreign = (True,) * len(exchange.bucket.members)
            for observer in self.observers:
                observer.committed(self.rank, exchange.name, counters)
            return
        undo = state.remember(exchange.begun_in)
        if exchange.contexts:
            state.slots = {**old, **{slot: spare[slot] for slot in feedback.names(exchange.method)}}
            for own, reduced, ctx in zip(state.members, exchange.reduced, exchange.contexts, strict=True):
                own.slots = {**own.slots, **{k: v for k, v in reduced.state.items() if k not in feedback.BUFFERED}}
                for name, number in ctx.counters.items():
                    counters[name] = counters.get(name, 0) + number
        else:
            state.slots = {**old, **exchange.reduced[0].state}
        for number, over in exchange.over.items():
            exchange.ops.subtract(state.slots[feedback.RESIDUAL][slice(*exchange.bucket.spans[number])], over, -1.0)
        for member, span in zip(exchange.bucket.members, exchange.bucket.spans, strict=True) if unused else ():
            for slot in feedback.names(exchange.method) if member.name in unused else ():
                exchange.ops.write(state.slots[slot][slice(*span)], old[slot][slice(*span)], 1.0)
        handover.note_arrivals(exchange, undo, unused)
        kept = exchange.momentum
        handed_over = kept is not state.momentum
        if unused and handed_over:
            members = [member.name in unused for member in exchange.bucket.members]
            like = exchange.outs[0]
            kept = handover.with_parts_of(kept, state.momentum, members, exchange.bucket, exchange.ops, like)
        if handed_over:
            state.before, state.momentum = state.momentum, kept
        state.updates = exchange.updates
        state.foreign = tuple(member.name in unused for member in exchange.bucket.members) if unused else ()
        # a slot that now lives in its second buffer leaves the old array behind as the next one
        state.spare = {slot: old[slot] if state.slots.get(slot) is spare[slot] else spare[slot] for slot in spare}
        state.step += 1
        state.restart = exchange.restart
        state.lengths |= exchange.lengths
        if len(exchange.method.phases) > 1 and self.phase_now(exchange.bucket)[0] != exchange.ctx.phase:
            state.lengths.clear()  # a phase that comes again may have other lengths
        state.undo = undo
        if any(reduced.trigger for reduced in exchange.reduced):
            self.asking.add(exchange.name)
        for observer in self.observers:
            observer.committed(self.rank, exchange.name, counters)

    def begin_round(self) -> None:
        """A new step: from now on :meth:`discard` means this one.

        It is also called by an exchange of a bucket that has had one in this step already, as drivers whose buckets
        are exchanged by themselves know of no end of a step.
        """
        self.round, self._can_discard = self.round + 1, True

    def end_round(self) -> None:
        """The optimizer has used the results: nothing is to be taken back."""
        self.round, self._can_discard = self.round + 1, False

    def _forget_undo(self, state: State) -> None:
        if state.undo and state.undo.round == self.round:
            self.begin_round()
        state.undo, self._can_discard = None, True

    def discard(self) -> None:
        """Bring every state to what it was before the last step; one that had an Inf or a NaN has changed nothing.

        Raises:
            RuntimeError: there was none, or it was discarded already, or a state was loaded since.
        """
        if not self._can_discard:
            raise RuntimeError("there is no step to discard: none since the last discard(), or a state was loaded")
        self._can_discard = False
        for state in self.states.values():
            if state.undo and state.undo.round == self.round:
                state.go_back()
                self.asking.discard(state.bucket.spec.name)

    def abandon(self, exchange: Exchange, fill: bool = True) -> None:
        """Leave the state as it was before the step; ``fill`` the results with NaN."""
        if exchange.communication:
            exchange.communication.close()
        exchange.state.spare = exchange.spare
        for out in exchange.outs if fill else ():
            if out is not None:
                exchange.ops.fill(out, float("nan"))

    def worked(self, name: str, seconds: float, last: bool) -> None:
        """Tell observers of codec work: before the exchange's last collective, or after it."""
        for observer in self.observers:
            (observer.decoded if last else observer.encoded)(self.rank, name, seconds)

    def answered(self, exchange: Exchange, seconds: float) -> None:
        """Tell observers that the collective that an exchange waits for has brought its result."""
        verb = exchange.verb
        assert verb is not None
        num_bytes = verb.num_bytes if isinstance(verb, Broadcast) else int(verb.x.nbytes)
        facts = exchange.name, exchange.method.id, exchange.round, type(verb).__name__, num_bytes
        for observer in self.observers:
            observer.answered(self.rank, *facts, seconds)

    def _state(self, bucket: Bucket, like: Array, ops: Ops) -> State:
        """The bucket's state; at first use what was loaded for it, or zeros."""
        state = self.states.get(bucket.spec.name)
        if state is None:
            state = self.states[bucket.spec.name] = self._claim(bucket) or self._blank(bucket, like, ops)
        for before, now in zip(state.bucket.members, bucket.members, strict=True) if state.bucket is not bucket else ():
            if before.shape != now.shape:
                raise ValueError(f"tensor {now.name!r} had shape {before.shape} before and has {now.shape} now")
        return state

    def _blank(self, bucket: Bucket, like: Array, ops: Ops) -> State:
        def zeros(declared: Mapping[str, Slot]) -> dict[str, Array]:
            return {name: ops.zeros(prod(slot.shape), slot.dtype, like) for name, slot in declared.items()}

        return State(bucket, zeros(declared_slots(bucket)), [Own(zeros(each)) for each in declared_by_members(bucket)])

    def _joined(self, exchange: Exchange, like: Array) -> Array:
        """A buffer for the members' gradients, which is kept: fresh memory costs more than copying."""
        state, size, dtype = exchange.state, exchange.bucket.spec.size, exchange.dtype
        if state.joined is None or itemsize(dtype) * size != state.joined.nbytes:
            state.joined = exchange.ops.zeros(size, dtype, like)
        return state.joined

    # -- triggers -------------------------------------------------------------------------------------------

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Show metrics to the methods; if one of them takes it for a call to restart, ask for a trigger."""
        methods = {self.method_now(state.bucket) for state in self.states.values()}
        for metric, value in metrics.items():
            value = float(value) if np.isfinite(value) else float("inf")  # a loss of NaN is as bad as can be
            low, high = self.metrics.get(metric, (value, value))
            self.metrics[metric] = low, high = min(low, value), max(high, value)
            self.asks_for_trigger |= any(method.notices(metric, value, low, high) for method in methods)

    def take_request(self) -> bool:
        """Whether this rank asks for a trigger; the request is taken back."""
        asked = self.asks_for_trigger or bool(self.asking)
        self.asks_for_trigger = False
        self.asking.clear()
        return asked

    def trigger(self, names: Iterable[str] | None = None) -> None:
        """All ranks agreed: schedules restart with the next step, of these buckets, or of all."""
        for name in list(self.states if names is None else names):
            self.states[name].triggers += 1
        self.metrics.clear()

    # -- what is known --------------------------------------------------------------------------------------

    def buckets(self) -> list[Bucket]:
        """The buckets that have gone through."""
        return [state.bucket for state in self.states.values()]

    def names(self) -> list[str]:
        """The names of all tensors that have gone through."""
        return [member.name for bucket in self.buckets() for member in bucket.members]

    def steps(self) -> dict[str, int]:
        """Steps done, by tensor, where there are any; of loaded tensors that have not gone through, too."""
        done = {member.name: state.step for state in self.states.values() for member in state.bucket.members}
        loaded = self._loaded["steps"] if self._loaded else {}
        return {name: step for name, step in {**loaded, **done}.items() if step}

    def ages(self) -> dict[str, tuple[int, ...]]:
        """Where tensors are in their programs, of those that are not at the start; only equal ones can be joined."""
        steps, loaded = self.steps(), self._loaded["restarts"] if self._loaded else {}
        restarts = {name: tuple(numbers) for name, numbers in loaded.items()}
        for state in self.states.values():
            if state.triggers:
                restarts |= {member.name: (state.triggers, *state.restart) for member in state.bucket.members}
        return {name: (steps.get(name, 0), *restarts.get(name, ())) for name in steps.keys() | restarts.keys()}

    def warn_of_what_is_idle(self, specs: Sequence[TensorSpec] = ()) -> None:
        """Log, on rank 0, which of the plan's rules apply to no tensor, and what was loaded of tensors that never came.

        Args:
            specs: all tensors; without them, where a driver gets to know them as they come, those that have come after
                some steps.
        """
        if not specs and self.plan.rules and self.ledger.steps == SEEN:
            specs = [spec for bucket in self.buckets() for spec in bucket.members]
        for rule in self.plan.idle_rules(specs) if specs and self.rank == 0 else ():
            there = log.some([spec.name for spec in specs])
            log.warn_once(f"the rule for {{{rule.match}}} applies to no tensor; there are {there}")
        if self._loaded and self.round == self._claimed_by and self.rank == 0:
            log.warn_once(
                f"the state that was loaded of {log.some([*self._loaded['steps']])} is used by no tensor so far: there "
                f"are {log.some(self.names())}; if tensors have other names now, their residuals are lost"
            )

    def regroup(self, buckets: Sequence[Bucket]) -> None:
        """Bring what is kept of tensors into these buckets. One that is in none of them is by itself from now on."""
        groups, here = {_names(bucket) for bucket in buckets}, {name for bucket in buckets for name in _names(bucket)}
        changed = [state for state in self.states.values() if _names(state.bucket) not in groups]
        moved = [state for state in changed if not here.isdisjoint(_names(state.bucket))]
        if not moved:
            return
        saved = {**(self._loaded or {}), **self._tables(moved)}
        left = [spec for state in moved for spec in state.bucket.members if spec.name not in here]
        alone = [bucket for spec in left for bucket in self.plan.buckets([spec])]
        kept = [snapshot.restored(saved, bucket, self._copy, whole=False) for bucket in alone]
        self.replaced = True
        for state in moved:
            del self.states[state.bucket.spec.name]
        self.states |= {state.bucket.spec.name: state for state in kept if state}
        self._loaded = snapshot.without(saved, alone)

    def find(self, name: str) -> tuple[State, int]:
        """The state that a tensor belongs to, and its place among the members.

        Raises:
            KeyError: no tensor of that name has gone through.
        """
        for state in self.states.values():
            for place, member in enumerate(state.bucket.members):
                if member.name == name:
                    return state, place
        raise KeyError(f"no tensor {name!r} has gone through yet; known: {', '.join(sorted(self.names())) or 'none'}")

    def residual(self, name: str) -> Array | None:
        """The residual of one tensor, flat, a view; None where none is kept.

        Raises:
            KeyError: no tensor of that name has gone through.
        """
        state, place = self.find(name)
        start, stop = state.bucket.spans[place]
        residual = state.slots.get(feedback.RESIDUAL)
        return None if residual is None else residual[start:stop]

    def forget(self, names: Iterable[str]) -> None:
        """Drop the states of these buckets, as if they had never come."""
        for name in names:
            self.states.pop(name, None)

    def release(self) -> None:
        """Drop all states."""
        self._can_discard = False
        self.states.clear()
        self.replaced = True

    def forget_lengths(self) -> None:
        """Some rank's state was replaced: all tell each other again how long their payloads are."""
        for state in self.states.values():
            state.lengths.clear()
        self.replaced = False

    # -- saved and restored ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's state as plain data, arrays copied; ``snapshot.py`` says what is in it."""
        head: dict[str, Any] = {"format": snapshot.FORMAT, "plan": self.plan.to_dict()}
        head |= {"world": self.world, "rank": self.rank}
        head["metrics"] = {metric: list(pair) for metric, pair in self.metrics.items()}
        return head | self._tables(self.states.values())

    def _tables(self, states: Iterable[State]) -> dict[str, dict[str, Any]]:
        """The tables of these states, and of what was loaded of tensors that have not come yet."""
        tables, waiting = snapshot.tables(states), self._loaded or dict.fromkeys(snapshot.TABLES, {})
        return {table: {**waiting[table], **tables[table]} for table in snapshot.TABLES}

    def check_origin(self, saved: snapshot.Saved) -> None:
        """Refuse what is no saved state, and that of another format, world or rank.

        Raises:
            ValueError: it says which.
        """
        snapshot.check(saved)
        for key, mine in (("world", self.world), ("rank", self.rank)):
            if saved[key] != mine:
                hint = "; Compressor.load re-shards a folder with the states of all ranks" if key == "world" else ""
                raise ValueError(f"the saved state is of {key} {saved[key]!r}, this is {key} {mine!r}{hint}")

    def load_state_dict(
        self, saved: snapshot.Saved, copy: snapshot.Copy, buckets: Sequence[Bucket] | None = None
    ) -> None:
        """Take a saved state over: all of it or, on any error, none.

        Args:
            saved: what :meth:`state_dict` returned.
            copy: makes a fresh array of a slot's saved parts.
            buckets: all there are; the state must have no other tensors. None if that is not known yet: then each
                bucket finds its state when it comes.

        Raises:
            ValueError: it is of another format, world, rank or set of tensors, or an array is not what its slot
                declares; the message says which.
        """
        self.check_origin(saved)
        if buckets is not None:
            known = {member.name for bucket in buckets for member in bucket.members}
            if unknown := sorted(saved["steps"].keys() - known):
                raise ValueError(f"the saved state has tensors that are not here: {', '.join(unknown)}")
        found = [snapshot.restored(saved, each, copy) for each in (self.buckets() if buckets is None else buckets)]
        self.states, self.replaced = {state.bucket.spec.name: state for state in found if state}, True
        self._can_discard = False
        self._loaded, self._copy = snapshot.without(saved, self.buckets()), copy
        self._claimed_by = self.round + SEEN
        self.metrics = {metric: (low, high) for metric, (low, high) in saved["metrics"].items()}

    def _claim(self, bucket: Bucket) -> State | None:
        """The state that was loaded for a bucket before it came."""
        state = snapshot.restored(self._loaded, bucket, self._copy, whole=False) if self._loaded else None
        if state:
            assert self._loaded is not None
            self._loaded = snapshot.without(self._loaded, [bucket])
        return state

    def num_state_bytes(self) -> int:
        """Memory held for state, second buffers included."""
        return sum(int(array.nbytes) for state in self.states.values() for array in state.arrays())


def _names(bucket: Bucket) -> tuple[str, ...]:
    return tuple(member.name for member in bucket.members)
