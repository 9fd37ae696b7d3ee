"""One bucket in one step, from its gradients to its new state, without I/O.

An exchange passes through the stages of :class:`Stage` in this order::

        add … add          FILLING     gradients arrive
    start              RUNNING     the method waits for a collective
        resume … resume    REDUCED     the method has returned its result
        deliver            DELIVERED   the reduced gradients are in ``outs``
        new_state, close   CLOSED      the step is committed; or abandon, from any stage

The caller performs the collectives and calls :meth:`Exchange.resume` with each result. An exchange never writes to the
state that it began with, so :meth:`Exchange.abandon` has nothing to restore.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Hashable, Sequence
from enum import IntEnum
from typing import Any, Literal

import numpy as np

from hvdcompress.engine.bucket_state import BucketState
from hvdcompress.engine.collectives import Pending, by_rank, require_collective
from hvdcompress.engine.fused import FusedCommunication
from hvdcompress.engine.intake import Intake, Tiles, Whole, suits_whole
from hvdcompress.engine.late import Late
from hvdcompress.engine.setup import Setup
from hvdcompress.engine.telemetry.observer import Completed
from hvdcompress.method import AllGather, Array, Broadcast, Collective, Communication, Reduced, Sparse, TensorSpec
from hvdcompress.ops.vectors import FP16_MAX, Flag, Outer, Shares, Spectra
from hvdcompress.parts import feedback
from hvdcompress.plan import Bucket

VARIABLE_LENGTH_HINT = "; if lengths may differ, set `variable_length = True` or yield AllGather(fixed_length=False)"


class ExchangeError(RuntimeError):
    """The method of an exchange failed. The message names the tensor, the method, the round and the rank."""


class Stage(IntEnum):
    """Stage of an exchange."""

    FILLING = 0
    RUNNING = 1
    REDUCED = 2
    DELIVERED = 3
    CLOSED = 4


class Exchange:
    """One bucket in one step.

    Args:
        setup: the state, buffers and settings of the exchange.

    Attributes:
        stage: the current stage.
        name: the name of the bucket.
        outs: flat arrays that receive the reduced gradients, one per tensor of the bucket.
        collective: in stage RUNNING, the collective whose result the method needs next.
        reduced: from stage REDUCED on, the results of the method: one for the bucket, or one per tensor if the method
            runs on each tensor.
        round: the index of the collective that the method waits for, from 0.
        late: after :meth:`new_state`, what the optimizer's momentum is adapted to; None if it is not adapted.
        pending: the same collective, in flight.
    """

    level: Literal["between"] = "between"  #: with two levels, the level of the collectives

    def __init__(self, setup: Setup):
        self.setup = setup
        self.ops = setup.ops
        self.dtype = setup.dtype
        self.state = setup.state
        self.begun_in = setup.begun_in
        self.name = setup.bucket.spec.name
        self.stage = Stage.FILLING
        self.outs: list[Any] = [None] * len(setup.bucket.members)
        self.collective: Collective | None = None
        self.reduced: list[Reduced] = []
        self.round = -1
        self.pending: Pending | None = None
        self.late: Late | None = None
        self._fused = setup.fuse()
        self._intake: Intake = Whole(setup) if suits_whole(setup) else Tiles(setup, self._fused)
        self._communication: Communication | FusedCommunication | None = self._fused
        self._lengths: dict[Hashable, int] = {}  # fixed payload lengths to add to Memory.lengths on commit
        # {index of a tensor: the part of its result that float16 cannot hold}, in the units of the residual
        self._overflow: dict[int, Array] = {}
        self._yielded_at = 0.0

    # -- FILLING --------------------------------------------------------------------------------------------

    def add(self, indices: Sequence[int], gradients: Sequence[Array], outs: Sequence[Any] | None = None) -> None:
        """Add gradients of the bucket's tensors, in any order.

        A gradient with an Inf or a NaN is replaced by zeros, because methods must not see one. The step will be
        abandoned.

        Args:
            indices: indices of the tensors in the bucket.
            gradients: their flat gradients in the working dtype. They are read until :meth:`deliver`. On a device, a
                gradient with an Inf or a NaN may be overwritten with zeros.
            outs: flat arrays that receive the reduced gradients. An entry may be None if the caller sets it in
                :attr:`outs` before :meth:`deliver`. Without ``outs``, the results overwrite the gradients.

        Raises:
            ExchangeError: the method failed.
            ValueError: a gradient does not have the size of its tensor, or the tensor already has a gradient.
        """
        self._expect(Stage.FILLING)
        for index, gradient in zip(indices, gradients, strict=True):
            check_gradient(self.setup.bucket.members[index], gradient, self._intake.has(index))
        # Check all gradients before accepting any, so that an error leaves the exchange unchanged
        for index, out in zip(indices, gradients if outs is None else outs, strict=True):
            self.outs[index] = out
        began = time.perf_counter()
        try:
            self._intake.add(indices, gradients)
        except Exception as error:
            raise self.wrap_error(error) from error
        self._record_codec_time(time.perf_counter() - began)

    @property
    def is_full(self) -> bool:
        """Whether all gradients have been added."""
        return not self._intake.num_missing

    @property
    def finite(self) -> Flag:
        """Whether all added gradients are free of Inf and NaN: a bool, or a tensor of one element on a device."""
        return self._intake.finite

    @property
    def x(self) -> Array | None:
        """The vector to exchange, [n]: gradient + residual, or the gradient; None until the intake has started it."""
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
            raise RuntimeError(self.describe_missing())
        setup = self.setup
        if self._fused is None:
            assert self.x is not None
            self._communication = setup.feedback.exchange(self.x, setup.ctx, setup.work)
        self.stage = Stage.RUNNING
        self._send(None)

    def resume(self, result: Any) -> Collective | None:
        """Pass the result of the collective to the method and run it to its next collective.

        Returns:
            The next collective, or None if the method is done.

        Raises:
            ExchangeError: the method failed.
        """
        self._expect(Stage.RUNNING)
        setup = self.setup
        assert self.collective is not None
        seconds = time.perf_counter() - self._yielded_at
        num_bytes = (
            self.collective.num_bytes if isinstance(self.collective, Broadcast) else int(self.collective.x.nbytes)
        )
        answer = Completed(setup.method.id, self.round, type(self.collective).__name__, num_bytes, seconds)
        for observer in setup.rank_state.observers:
            observer.completed(setup.rank_state.rank, self.name, answer)
        return self._send(result)

    def _send(self, result: Any) -> Collective | None:
        assert self._communication is not None
        began = time.perf_counter()
        try:
            self.collective = require_collective(self._communication.send(result))
            self.round += 1
        except StopIteration as stop:
            self.collective = None
            self.reduced = stop.value if self._fused else [stop.value]
            self.stage = Stage.REDUCED
        except Exception as error:
            raise self.wrap_error(error) from error
        finally:
            self._yielded_at = time.perf_counter()
            self._record_codec_time(self._yielded_at - began)
        return self.collective

    @property
    def collective_key(self) -> Hashable:
        """Key of the current collective: the length of a fixed-length all-gather must depend on nothing else."""
        setup = self.setup
        return setup.method, setup.ctx.phase, setup.ctx.triggers, self.round

    def known_lengths(self) -> tuple[int, ...] | None:
        """Return the bytes of all ranks' payloads, in rank order, for the current all-gather; None if not known.

        Raises:
            ExchangeError: the length is declared as fixed, but differs from an earlier step.
        """
        if not (isinstance(self.collective, AllGather) and self.collective.fixed_length):
            return None
        before = self.setup.memory.lengths.get(self.collective_key)
        now = len(self.collective.x)
        if before not in (None, now):
            message = f"a fixed-length all-gather had {before} bytes before and {now} now{VARIABLE_LENGTH_HINT}"
            raise self.wrap_error(ValueError(message))
        return None if before is None else (now,) * self.setup.group.world_size

    def note_lengths(self, lengths: Sequence[int]) -> None:
        """Remember payload lengths, if they are declared as fixed.

        Args:
            lengths: bytes of the payloads, in rank order.

        Raises:
            ExchangeError: the lengths differ between ranks.
        """
        if not (isinstance(self.collective, AllGather) and self.collective.fixed_length):
            return
        each = by_rank(lengths, self.setup.group.world_size)
        if len(set(each)) > 1:
            message = f"a fixed-length all-gather has {each} bytes by rank{VARIABLE_LENGTH_HINT}"
            raise self.wrap_error(ValueError(message))
        self._lengths[self.collective_key] = each[0]

    # -- REDUCED --------------------------------------------------------------------------------------------

    def deliver(self, factor: float) -> None:
        """Write the reduced gradients, ``factor`` times the totals, into :attr:`outs`.

        Args:
            factor: 1/world_size for an average, 1 for a sum.
        """
        self._expect(Stage.REDUCED)
        setup = self.setup
        began = time.perf_counter()
        share = setup.scale / (factor * setup.group.world_size)
        # A residual adds up several steps, and a lossy method may round up, so a result can exceed the range of float16
        # although no gradient does. A sum can do so, too, and is then Inf
        is_average = share > 0.999 * setup.scale and not setup.method.identity
        if setup.bucket.spec.dtype == "float16" and (setup.with_feedback or is_average):
            results = [setup.ops.zeros(len(out), "float32", like=out) for out in self.outs]
            self.write_totals(factor, results)
            self._limit(results, share)
        else:
            self.write_totals(factor, self.outs)
        self.stage = Stage.DELIVERED
        self._record_codec_time(time.perf_counter() - began)

    def write_totals(self, factor: float, outs: Sequence[Array]) -> None:
        """Write ``factor`` times the totals into ``outs``."""
        setup = self.setup
        ops = setup.ops
        total: Any = self.reduced[0].total
        factor = factor / setup.scale
        if len(self.reduced) == len(outs):
            for out, reduced in zip(outs, self.reduced, strict=True):
                ops.write(out, reduced.total, factor)
            return
        if isinstance(total, Outer | Spectra):  # these forms cannot be sliced by tensor
            lazy = total
            total = setup.work.buffer("total", setup.bucket.spec.size, "float32", outs[0])
            ops.write(total, lazy, 1.0)
        ops.write_parts(outs, total, factor)

    def _limit(self, results: Sequence[Array], share: float) -> None:
        """Write results into float16 ``outs``. The part outside the float16 range goes into the residuals of all ranks.

        Args:
            results: float32 results, one per tensor.
            share: factor from a result to one rank's share of it, in the units of the residual.
        """
        setup = self.setup
        self._overflow.clear()
        for index, (result, out) in enumerate(zip(results, self.outs, strict=True)):
            limited = setup.ops.scaled(result, 1.0, FP16_MAX)
            # The check would synchronise with a device, so on a device the overflow is always kept
            if setup.with_feedback and (not isinstance(result, np.ndarray) or setup.ops.max_abs(result) > FP16_MAX):
                self._overflow[index] = (result - limited) * np.float32(share).item()
            setup.ops.write(out, limited, 1.0)

    # -- DELIVERED ------------------------------------------------------------------------------------------

    def new_state(
        self, before: BucketState | None = None, unused: Collection[str] = (), sent: Array | None = None
    ) -> BucketState:
        """Return the state after this step, and set :attr:`late`.

        Args:
            before: not used: an exchange has read the state at its beginning.
            unused: names of the tensors whose results no rank uses. They keep their residual and velocity.
            sent: with two levels, the elements of the result that are not zero, as all ranks of the node see them.
        """
        self._expect(Stage.DELIVERED)
        setup = self.setup
        if setup.paused:
            return setup.state
        slots = {**setup.state.slots, **(setup.feedback.spare if self._fused else self.reduced[0].state)}
        members = setup.state.members
        if self._fused:
            # Residuals are views of the bucket's buffers, which are in ``slots`` already
            members = tuple(
                {**own, **{slot: new for slot, new in reduced.state.items() if slot not in feedback.BUFFERED}}
                for own, reduced in zip(members, self.reduced, strict=True)
            )
        # The new slots are second buffers that nobody else reads yet, so they may be written in place
        for index, overflow in self._overflow.items():
            start, stop = setup.bucket.spans[index]
            setup.ops.subtract(slots[feedback.RESIDUAL][start:stop], overflow, -1.0)
        if unused:
            for member, (start, stop) in zip(setup.bucket.members, setup.bucket.spans, strict=True):
                for slot in feedback.slot_names(setup.method) if member.name in unused else ():
                    setup.ops.write(slots[slot][start:stop], setup.state.slots[slot][start:stop], 1.0)
        return BucketState(
            setup.bucket,
            slots,
            members,
            self._note_sent(unused, sent),
            setup.state.step + 1,
            setup.state.triggers,
            setup.next_step.restart,
            setup.rank_state.is_flushed(setup.state, unused, any(map(setup.ops.max_abs, self._overflow.values()))),
        )

    def _note_sent(self, unused: Collection[str], sent: Array | None) -> Array | None:
        """Set :attr:`late`, and return ``BucketState.arrived`` after this step."""
        setup = self.setup
        totals: list[Any] = [reduced.total for reduced in self.reduced]
        indices: list[Array] | None = None
        ranks = 1
        if sent is not None:
            indices = [sent]
        elif all(isinstance(total, Sparse | Shares) for total in totals):
            shares = [list(total.each) if isinstance(total, Shares) else [total] for total in totals]
            indices = [setup.ops.concat([share.index for share in each]) for each in shares]
            ranks = max(map(len, shares))
        self.late, arrived = setup.rank_state.note_sent(setup.state, setup.method, setup.ops, unused, indices, ranks)
        return arrived

    def close(self) -> None:
        """End the exchange after the commit."""
        self._expect(Stage.DELIVERED)
        setup = self.setup
        # Counters and lengths become visible only now, because an abandoned step must leave no trace
        counters = setup.work.counters
        for _, work in setup.per_tensor:
            for name, count in work.counters.items():
                counters[name] = counters.get(name, 0) + count
        if not setup.paused:
            setup.memory.lengths |= self._lengths
            if len(setup.method.phases) > 1 and setup.rank_state.next_step(setup.bucket).phase != setup.ctx.phase:
                setup.memory.lengths.clear()  # a later phase may have other payload lengths
            if any(reduced.trigger for reduced in self.reduced):
                setup.rank_state.trigger_requests.add(self.name)
        self.stage = Stage.CLOSED
        for observer in setup.rank_state.observers:
            observer.committed(setup.rank_state.rank, self.name, counters)

    def abandon(self, fill: bool = False) -> None:
        """End the exchange without effect.

        Args:
            fill: whether to fill the results with NaN.
        """
        self.stage = Stage.CLOSED
        # Closing the generator frees the buffers that its frame refers to
        if self._communication:
            self._communication.close()
        for out in self.outs if fill else ():
            if out is not None:
                out[:] = float("nan")

    # -- descriptions for messages --------------------------------------------------------------------------

    def describe_wait(self, count: int = 1) -> str:
        """Describe the collective that this rank waits for. ``count`` is the number of exchanges that wait."""
        more = f", and {count - 1} more" if count > 1 else ""
        return f"tensor {self.name!r} (method {self.setup.method.id}, round {max(self.round, 0)}{more})"

    def describe_missing(self) -> str:
        """Name the gradients that have not been added."""
        return describe_missing(self.setup.bucket, self._intake.missing())

    def wrap_error(self, error: Exception) -> ExchangeError:
        """Wrap an exception from the method with the tensor, round and rank."""
        name = self._fused.current if self._fused else self.name
        local = self.setup.rank_state
        who = f"rank {local.rank}" if local.nodes is None else f"rank {local.rank}, node {self.setup.group.rank}"
        where = f"method {self.setup.method.id}, round {max(self.round, 0)}, {who}"
        return ExchangeError(f"tensor {name!r} ({where}): {type(error).__name__}: {error}")

    def _expect(self, *stages: Stage) -> None:
        """Check the stage. A wrong stage is a bug in a driver.

        Raises:
            RuntimeError: the exchange is in another stage.
        """
        if self.stage not in stages:
            wanted = " or ".join(stage.name for stage in stages)
            raise RuntimeError(f"the exchange of bucket {self.name!r} is in stage {self.stage.name}, expected {wanted}")

    def _record_codec_time(self, seconds: float) -> None:
        """Report codec time to the observers: encoding until the last collective, decoding after it."""
        local = self.setup.rank_state
        for observer in local.observers:
            if self.stage < Stage.REDUCED:
                observer.encoded(local.rank, self.name, seconds)
            else:
                observer.decoded(local.rank, self.name, seconds)


def check_gradient(member: TensorSpec, gradient: Array, has_arrived: bool) -> None:
    """Raise ValueError if a gradient does not have the size of its tensor, or the tensor already has a gradient."""
    if len(gradient) != member.size:
        raise ValueError(f"tensor {member.name!r} has {member.size} elements, its gradient has {len(gradient)}")
    if has_arrived:
        raise ValueError(f"tensor {member.name!r} got a second gradient in the same step")


def describe_missing(bucket: Bucket, indices: Sequence[int]) -> str:
    """Name the gradients of a bucket that have not been added."""
    names = ", ".join(repr(bucket.members[index].name) for index in indices)
    return f"bucket {bucket.spec.name!r} is incomplete: no gradient of {names} was added"
