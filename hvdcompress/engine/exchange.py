"""One bucket in one step: from its gradients to its next state, without I/O.

An exchange goes through the stages of :class:`Stage`, in their order::

    add … add          FILLING     gradients come in
    start              RUNNING     the method waits for a collective
    resume … resume    REDUCED     the method has returned
    deliver            DELIVERED   the reduced gradients are in ``outs``
    new_state, close   CLOSED      the step is good; or abandon, at any stage

Whoever carries collectives out calls :meth:`Exchange.resume` with each result. The state that an exchange began with is
never written to, so :meth:`Exchange.abandon` has nothing to undo.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Hashable, Sequence
from dataclasses import replace
from enum import IntEnum
from typing import Any

import numpy as np

from hvdcompress.engine.bucket_state import BucketState, MomentumState
from hvdcompress.engine.collectives import Pending, by_rank
from hvdcompress.engine.intake import Intake, Tiles, Whole, suits_whole
from hvdcompress.engine.momentum import Adapter
from hvdcompress.engine.setup import Setup
from hvdcompress.engine.telemetry.observer import Answer
from hvdcompress.engine.together import Together
from hvdcompress.method import AllGather, Array, Broadcast, Collective, Communication, Reduced
from hvdcompress.ops.vectors import FP16_MAX, Flag, Outer, Spectra
from hvdcompress.parts import feedback, momentum

UNEVEN = "; where lengths differ, the method says `uneven = True`, or its AllGather `fixed=False`"


class ExchangeError(RuntimeError):
    """An exchange failed; the message names the tensor, the method, the round and the rank."""


class Stage(IntEnum):
    """Where an exchange is."""

    FILLING = 0
    RUNNING = 1
    REDUCED = 2
    DELIVERED = 3
    CLOSED = 4


class Exchange:
    """One bucket in one step.

    Args:
        setup: what it works with.

    Attributes:
        stage: where the exchange is.
        name: the name of the bucket.
        outs: the flat arrays that receive the reduced gradients, in the order of the bucket.
        collective: in stage RUNNING, the collective that the method waits for.
        reduced: from stage REDUCED on, what the method returned; one for the bucket, or one for each tensor where the
            method runs on each.
        round: the number of the collective that the method waits for.
        pending: that collective under way.
    """

    def __init__(self, setup: Setup):
        self.setup = setup
        self.name = setup.bucket.spec.name
        self.stage = Stage.FILLING
        self.outs: list[Any] = [None] * len(setup.bucket.members)
        self.collective: Collective | None = None
        self.reduced: list[Reduced] = []
        self.round = -1
        self.pending: Pending | None = None
        self._together = setup.together()
        self._intake: Intake = Whole(setup) if suits_whole(setup) else Tiles(setup, self._together)
        self._communication: Communication | Together | None = self._together
        self._adapter: Adapter | None = None
        self._lengths: dict[Hashable, int] = {}  # what this step adds to Memory.lengths
        self._over: dict[int, Array] = {}  # by index, what float16 results could not hold, as the residual keeps it
        self._asked_at = 0.0

    # -- FILLING --------------------------------------------------------------------------------------------

    def add(self, indices: Sequence[int], gradients: Sequence[Array], outs: Sequence[Any] | None = None) -> None:
        """Take gradients of the bucket's tensors, in any order.

        A gradient with an Inf or a NaN takes part as zeros, so that no method ever sees one, and the step is to be
        abandoned.

        Args:
            indices: which tensors of the bucket.
            gradients: their flat gradients in the working dtype; read only until :meth:`deliver`, except that on a
                device one with an Inf or a NaN may be set to 0.
            outs: the flat arrays that receive the reduced gradients; an entry may be None if it is put into
                :attr:`outs` before :meth:`deliver`. Without ``outs`` the results are written over the gradients.

        Raises:
            ExchangeError: the method failed.
            ValueError: a gradient has not as many elements as its tensor, or has come already.
        """
        self._expect(Stage.FILLING)
        for index, gradient in zip(indices, gradients, strict=True):
            member = self.setup.bucket.members[index]
            if len(gradient) != member.size:
                raise ValueError(f"tensor {member.name!r} has {member.size} elements, {len(gradient)} came")
            if self._intake.has(index):
                raise ValueError(f"a second gradient of tensor {member.name!r} came in one step")
        for index, out in zip(indices, gradients if outs is None else outs, strict=True):
            self.outs[index] = out
        began = time.perf_counter()
        try:
            self._intake.add(indices, gradients)
        except Exception as error:
            raise self.failed(error) from error
        self._note_work(time.perf_counter() - began)

    @property
    def is_full(self) -> bool:
        """Whether all gradients have come."""
        return not self._intake.num_missing

    @property
    def finite(self) -> Flag:
        """Whether all gradients that came have neither Inf nor NaN; a tensor of one element on a device."""
        return self._intake.finite

    @property
    def x(self) -> Array | None:
        """What is exchanged [n]: gradient + residual, or the gradient; None before it is there."""
        return self._intake.x

    def fill_missing(self) -> None:
        """Add zeros for the tensors that have no gradient on this rank."""
        setup = self.setup
        missing = self._intake.missing()
        sizes = [setup.bucket.members[index].size for index in missing]
        self.add(missing, [setup.ops.zeros(size, setup.dtype, setup.like) for size in sizes])

    # -- RUNNING --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Run the method to its first collective.

        Raises:
            ExchangeError: the method failed.
        """
        self._expect(Stage.FILLING)
        if not self.is_full:
            raise RuntimeError(self.missing_in_words())
        setup = self.setup
        if self._together is None:
            assert self.x is not None
            self._communication = setup.feedback.exchange(self.x, setup.ctx, setup.work)
        self.stage = Stage.RUNNING
        self._send(None)

    def resume(self, result: Any) -> Collective | None:
        """Give the method the result of its collective; return the next collective, or None if the method is done.

        Raises:
            ExchangeError: the method failed.
        """
        self._expect(Stage.RUNNING)
        setup = self.setup
        assert self.collective is not None
        seconds = time.perf_counter() - self._asked_at
        num_bytes = (
            self.collective.num_bytes if isinstance(self.collective, Broadcast) else int(self.collective.x.nbytes)
        )
        answer = Answer(setup.method.id, self.round, type(self.collective).__name__, num_bytes, seconds)
        for observer in setup.local.observers:
            observer.answered(setup.local.rank, self.name, answer)
        return self._send(result)

    def _send(self, result: Any) -> Collective | None:
        assert self._communication is not None
        began = time.perf_counter()
        try:
            self.collective = self._communication.send(result)
            self.round += 1
        except StopIteration as stop:
            self.collective = None
            self.reduced = stop.value if self._together else [stop.value]
            self.stage = Stage.REDUCED
        except Exception as error:
            raise self.failed(error) from error
        finally:
            self._asked_at = time.perf_counter()
            self._note_work(self._asked_at - began)
        return self.collective

    @property
    def call(self) -> Hashable:
        """What the length of an all-gather must depend on alone, if it is fixed."""
        setup = self.setup
        return setup.method, setup.ctx.phase, setup.ctx.triggers, self.round

    def knows_lengths(self) -> bool:
        """Return whether the all-gather that is asked for is known to bring payloads of this rank's length from all.

        Raises:
            ExchangeError: the length is fixed, and was another one before.
        """
        if not (isinstance(self.collective, AllGather) and self.collective.fixed):
            return False
        before = self.setup.memory.lengths.get(self.call)
        now = len(self.collective.x)
        if before not in (None, now):
            raise self.failed(
                ValueError(f"an all-gather of fixed length had {before} bytes, and now has {now}{UNEVEN}")
            )
        return before is not None

    def note_lengths(self, lengths: Sequence[int]) -> None:
        """Note these lengths of payloads, in rank order, if they are fixed.

        Raises:
            ExchangeError: they differ.
        """
        if not (isinstance(self.collective, AllGather) and self.collective.fixed):
            return
        each = by_rank(lengths, self.setup.group.world)
        if len(set(each)) > 1:
            raise self.failed(ValueError(f"an all-gather of fixed length has {each} bytes, by rank{UNEVEN}"))
        self._lengths[self.call] = each[0]

    def resume_carried(self, result: Array, factor: float) -> float:
        """Go on with ``factor`` times the sum, which a stock all-reduce has brought.

        Returns:
            The factor that is left for :meth:`deliver`.
        """
        if self.setup.method.linear:
            self.resume(result)
            return 1.0
        self.resume(result * np.float32(1.0 / factor))
        return factor

    # -- REDUCED --------------------------------------------------------------------------------------------

    def deliver(self, factor: float, adapt: bool = True) -> None:
        """Write the reduced gradients, ``factor`` times the totals, into :attr:`outs`.

        With ``adapt``, the optimizer's momentum is adapted where the method says so; without it, :meth:`clip` does so.
        """
        self._expect(Stage.REDUCED, Stage.DELIVERED)
        setup = self.setup
        began = time.perf_counter()
        if adapt and self._has_momentum():
            self._adapter = Adapter(setup, self.reduced)
        if setup.bucket.spec.dtype == "float16" and setup.with_feedback:
            # Sums over steps can be larger than any gradient, so they are limited to what float16 holds
            results = [setup.ops.zeros(len(out), "float32", like=out) for out in self.outs]
            self._write(factor, results)
            self._limit(results, setup.scale / (factor * setup.group.world))
        else:
            self._write(factor, self.outs)
        self.stage = Stage.DELIVERED
        self._note_work(time.perf_counter() - began)

    def _has_momentum(self) -> bool:
        """Return whether the optimizer's momentum is adapted, or was and has to be given back."""
        return momentum.adapts(self.setup.method) or bool(self.setup.state.momentum.content)

    def _write(self, factor: float, outs: Sequence[Array]) -> None:
        """Write the results into ``outs``."""
        if not (self._adapter and self._adapter.write(factor, outs)):
            self.write_totals(factor, outs)

    def write_totals(self, factor: float, outs: Sequence[Array]) -> None:
        """Write ``factor`` times the totals into ``outs``, as they are."""
        setup = self.setup
        ops = setup.ops
        total: Any = self.reduced[0].total
        factor = factor / setup.scale
        if len(self.reduced) == len(outs):
            for out, reduced in zip(outs, self.reduced, strict=True):
                if out is not reduced.total or factor != 1.0:  # else the driver's own all-reduce has written it
                    ops.write(out, reduced.total, factor)
            return
        if isinstance(total, Outer | Spectra):  # they cannot be cut
            lazy = total
            total = setup.work.buffer("total", setup.bucket.spec.size, "float32", outs[0])
            ops.write(total, lazy, 1.0)
        ops.write_parts(outs, total, factor)

    def _limit(self, results: Sequence[Array], share: float) -> None:
        """Write results into float16 ``outs``. What those cannot hold goes to the residuals of all ranks.

        Args:
            results: float32, by tensor.
            share: what a result is multiplied by to get each rank's share of it, the loss scale apart.
        """
        setup = self.setup
        self._over.clear()
        for index, (result, out) in enumerate(zip(results, self.outs, strict=True)):
            limited = setup.ops.scaled(result, 1.0, FP16_MAX)
            # without waiting for a device
            if not isinstance(result, np.ndarray) or setup.ops.max_abs(result) > FP16_MAX:
                self._over[index] = (result - limited) * np.float32(share).item()
            setup.ops.write(out, limited, 1.0)

    # -- DELIVERED ------------------------------------------------------------------------------------------

    def norm(self) -> float:
        """Return the norm of the reduced gradients, the loss scale apart, while they are in :attr:`outs`."""
        norms = [self.setup.ops.l2_norm(out) for out in self.outs]
        return float(np.linalg.norm(norms)) * self.setup.scale

    def clip(self, factor: float, clipping: float) -> None:
        """Multiply the reduced gradients by ``clipping``, and adapt the optimizer's momentum.

        Args:
            factor: what :meth:`deliver` was called with, without ``adapt``.
            clipping: at most 1.
        """
        if self._has_momentum():
            self.deliver(factor * clipping)
        elif clipping < 1.0:
            for out in self.outs:
                self.setup.ops.write(out, out, clipping)

    def new_state(self, unused: Collection[str] = ()) -> BucketState:
        """Return the state after this step.

        Args:
            unused: tensors whose results no rank uses: they keep the slots of feedback.
        """
        self._expect(Stage.DELIVERED)
        setup = self.setup
        if setup.paused:
            known = self._adapter.paused_state() if self._adapter else setup.state.momentum
            return replace(setup.state, momentum=replace(known, foreign=(True,) * len(setup.bucket.members)))
        slots = {**setup.state.slots, **(setup.feedback.spare if self._together else self.reduced[0].state)}
        members = setup.state.members
        if self._together:
            members = tuple(
                {**own, **{slot: new for slot, new in reduced.state.items() if slot not in feedback.BUFFERED}}
                for own, reduced in zip(members, self.reduced, strict=True)
            )
        for index, over in self._over.items():
            start, stop = setup.bucket.spans[index]
            setup.ops.subtract(slots[feedback.RESIDUAL][start:stop], over, -1.0)
        for member, (start, stop) in zip(setup.bucket.members, setup.bucket.spans, strict=True) if unused else ():
            for slot in feedback.names(setup.method) if member.name in unused else ():
                setup.ops.write(slots[slot][start:stop], setup.state.slots[slot][start:stop], 1.0)
        return BucketState(
            setup.bucket,
            slots,
            members,
            self._momentum_state(unused),
            setup.state.step + 1,
            setup.state.triggers,
            setup.turn.restart,
        )

    def _momentum_state(self, unused: Collection[str]) -> MomentumState:
        chosen = tuple(member.name in unused for member in self.setup.bucket.members) if unused else ()
        if self._adapter:
            return self._adapter.new_state(chosen)
        return replace(self.setup.state.momentum, arrived=None, foreign=chosen)

    def close(self) -> None:
        """End the exchange: the new state is kept."""
        self._expect(Stage.DELIVERED)
        setup = self.setup
        counters = setup.work.counters
        for _, work in setup.each:
            for name, number in work.counters.items():
                counters[name] = counters.get(name, 0) + number
        if not setup.paused:
            setup.memory.lengths |= self._lengths
            if len(setup.method.phases) > 1 and setup.local.turn(setup.bucket).phase != setup.ctx.phase:
                setup.memory.lengths.clear()  # a phase that comes again may have other lengths
            if any(reduced.trigger for reduced in self.reduced):
                setup.local.asking.add(self.name)
        self.stage = Stage.CLOSED
        for observer in setup.local.observers:
            observer.committed(setup.local.rank, self.name, counters)

    def abandon(self, fill: bool = False) -> None:
        """End the exchange without effect; with ``fill``, set the results to NaN."""
        self.stage = Stage.CLOSED
        if self._communication:
            self._communication.close()
        for out in self.outs if fill else ():
            if out is not None:
                self.setup.ops.fill(out, float("nan"))

    # -- in words -------------------------------------------------------------------------------------------

    def where(self, count: int = 1) -> str:
        """Return what this rank waits for, in words, as the first of ``count`` exchanges."""
        more = f", and {count - 1} more" if count > 1 else ""
        return f"tensor {self.name!r} (method {self.setup.method.id}, round {max(self.round, 0)}{more})"

    def missing_in_words(self) -> str:
        """Return which gradients have not come, in words."""
        names = [self.setup.bucket.members[index].name for index in self._intake.missing()]
        return f"bucket {self.name!r} is incomplete: no gradient of {', '.join(map(repr, names))} has come"

    def failed(self, error: Exception) -> ExchangeError:
        """Wrap an exception from the method with the tensor, round and rank."""
        name = self._together.now if self._together else self.name
        where = f"method {self.setup.method.id}, round {max(self.round, 0)}, rank {self.setup.group.rank}"
        return ExchangeError(f"tensor {name!r} ({where}): {type(error).__name__}: {error}")

    def _expect(self, *stages: Stage) -> None:
        """Refuse a call in the wrong stage, which would be an error of a driver.

        Raises:
            RuntimeError: the exchange is in another stage.
        """
        if self.stage not in stages:
            wanted = " or ".join(stage.name for stage in stages)
            raise RuntimeError(f"the exchange of bucket {self.name!r} is {self.stage.name}, and must be {wanted}")

    def _note_work(self, seconds: float) -> None:
        """Tell observers of codec work: up to the last collective, or after it."""
        local = self.setup.local
        for observer in local.observers:
            (observer.encoded if self.stage < Stage.REDUCED else observer.decoded)(local.rank, self.name, seconds)
