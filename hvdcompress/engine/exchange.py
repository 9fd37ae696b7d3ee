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
from typing import Any, Literal

import numpy as np

from hvdcompress.engine.bucket_state import BucketState
from hvdcompress.engine.collectives import by_rank, require_collective
from hvdcompress.engine.commit import Slots
from hvdcompress.engine.fused import FusedCommunication
from hvdcompress.engine.intake import MethodIntake, Stage
from hvdcompress.engine.state import RankState
from hvdcompress.engine.telemetry.observer import Completed
from hvdcompress.engine.transport import Group
from hvdcompress.method import AllGather, Array, Broadcast, Collective, Communication, Reduced, Sparse
from hvdcompress.ops.spec import Ops
from hvdcompress.ops.vectors import FP16_MAX, Outer, Shares, Spectra
from hvdcompress.parts import feedback
from hvdcompress.plan import Bucket

VARIABLE_LENGTH_HINT = "; if lengths may differ, set `variable_length = True` or yield AllGather(fixed_length=False)"


class ExchangeError(RuntimeError):
    """The method of an exchange failed. The message names the tensor, the method, the round and the rank."""


class Exchange(MethodIntake):
    """One bucket in one step; see :class:`MethodIntake` for the arguments.

    Attributes:
        collective: in stage RUNNING, the collective whose result the method needs next.
        reduced: from stage REDUCED on, the results of the method: one for the bucket, or one per tensor if the method
            runs on each tensor.
    """

    level: Literal["between"] = "between"  #: with two levels, the level of the collectives

    def __init__(
        self, rank_state: RankState, group: Group, bucket: Bucket, like: Array, ops: Ops, loss_scale: float = 1.0
    ):
        super().__init__(rank_state, group, bucket, like, ops, loss_scale)
        self.collective: Collective | None = None
        self.reduced: list[Reduced] = []
        self._communication: Communication | FusedCommunication | None = self._fused
        self._lengths: dict[Hashable, int] = {}  # fixed payload lengths to add to Memory.lengths on commit
        # {index of a tensor: the part of its result that float16 cannot hold}, in the units of the residual
        self._overflow: dict[int, Array] = {}
        self._yielded_at = 0.0

    # -- FILLING --------------------------------------------------------------------------------------------

    def _take(self, indices: Sequence[int], gradients: Sequence[Array]) -> None:
        began = time.perf_counter()
        try:
            super()._take(indices, gradients)
        except Exception as error:
            raise self.wrap_error(error) from error
        self._record_codec_time(time.perf_counter() - began)

    # -- RUNNING --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Run the method to its first collective; see :meth:`Intake.start`."""
        super().start()
        if self._fused is None:
            assert self.x is not None
            self._communication = self.feedback.exchange(self.x, self.ctx, self.work)
        self._send(None)

    def resume(self, result: Any) -> Collective | None:
        """Pass the result of the collective to the method and run it to its next collective.

        Returns:
            The next collective, or None if the method is done.

        Raises:
            ExchangeError: the method failed.
        """
        self._expect(Stage.RUNNING)
        assert self.collective is not None
        seconds = time.perf_counter() - self._yielded_at
        num_bytes = (
            self.collective.num_bytes if isinstance(self.collective, Broadcast) else int(self.collective.x.nbytes)
        )
        answer = Completed(self.method.id, self.round, type(self.collective).__name__, num_bytes, seconds)
        for observer in self.rank_state.observers:
            observer.completed(self.rank_state.rank, self.name, answer)
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
        return self.method, self.ctx.phase, self.ctx.triggers, self.round

    def known_lengths(self) -> tuple[int, ...] | None:
        """Return the bytes of all ranks' payloads, in rank order, for the current all-gather; None if not known.

        Raises:
            ExchangeError: the length is declared as fixed, but differs from an earlier step.
        """
        if not (isinstance(self.collective, AllGather) and self.collective.fixed_length):
            return None
        before = self.memory.lengths.get(self.collective_key)
        now = len(self.collective.x)
        if before not in (None, now):
            message = f"a fixed-length all-gather had {before} bytes before and {now} now{VARIABLE_LENGTH_HINT}"
            raise self.wrap_error(ValueError(message))
        return None if before is None else (now,) * self.group.world_size

    def note_lengths(self, lengths: Sequence[int]) -> None:
        """Remember payload lengths, if they are declared as fixed.

        Args:
            lengths: bytes of the payloads, in rank order.

        Raises:
            ExchangeError: the lengths differ between ranks.
        """
        if not (isinstance(self.collective, AllGather) and self.collective.fixed_length):
            return
        each = by_rank(lengths, self.group.world_size)
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
        began = time.perf_counter()
        share = self.scale / (factor * self.group.world_size)
        # A residual adds up several steps, and a lossy method may round up, so a result can exceed the range of float16
        # although no gradient does. A sum can do so, too, and is then Inf
        is_average = share > 0.999 * self.scale and not self.method.identity
        if self.bucket.spec.dtype == "float16" and (self.with_feedback or is_average):
            results = [self.ops.zeros(len(out), "float32", like=out) for out in self.outs]
            self.write_totals(factor, results)
            self._limit(results, share)
        else:
            self.write_totals(factor, self.outs)
        self.stage = Stage.DELIVERED
        self._record_codec_time(time.perf_counter() - began)

    def write_totals(self, factor: float, outs: Sequence[Array]) -> None:
        """Write ``factor`` times the totals into ``outs``."""
        ops = self.ops
        total: Any = self.reduced[0].total
        factor = factor / self.scale
        if len(self.reduced) == len(outs):
            for out, reduced in zip(outs, self.reduced, strict=True):
                ops.write(out, reduced.total, factor)
            return
        if isinstance(total, Outer | Spectra):  # these forms cannot be sliced by tensor
            lazy = total
            total = self.work.buffer("total", self.bucket.spec.size, "float32", outs[0])
            ops.write(total, lazy, 1.0)
        ops.write_parts(outs, total, factor)

    def _limit(self, results: Sequence[Array], share: float) -> None:
        """Write results into float16 ``outs``. The part outside the float16 range goes into the residuals of all ranks.

        Args:
            results: float32 results, one per tensor.
            share: factor from a result to one rank's share of it, in the units of the residual.
        """
        self._overflow.clear()
        for index, (result, out) in enumerate(zip(results, self.outs, strict=True)):
            limited = self.ops.scaled(result, 1.0, FP16_MAX)
            # The check would synchronise with a device, so on a device the overflow is always kept
            if self.with_feedback and (not isinstance(result, np.ndarray) or self.ops.max_abs(result) > FP16_MAX):
                self._overflow[index] = (result - limited) * np.float32(share).item()
            self.ops.write(out, limited, 1.0)

    # -- DELIVERED ------------------------------------------------------------------------------------------

    def new_state(self, unused: Collection[str] = ()) -> BucketState:
        """Return the state after the step; see :meth:`Part.new_state`."""
        self._expect(Stage.DELIVERED)
        return super().new_state(unused)

    def new_slots(self, unused: Collection[str]) -> tuple[Slots, tuple[Slots, ...]]:
        """Return ``slots`` and ``members`` of the state after the step."""
        slots = {**self.state.slots, **(self.feedback.spare if self._fused else self.reduced[0].state)}
        members = self.state.members
        if self._fused:
            # Residuals are views of the bucket's buffers, which are in ``slots`` already
            members = tuple(
                {**own, **{slot: new for slot, new in reduced.state.items() if slot not in feedback.BUFFERED}}
                for own, reduced in zip(members, self.reduced, strict=True)
            )
        # The new slots are second buffers that nobody else reads yet, so they may be written in place
        for index, overflow in self._overflow.items():
            start, stop = self.bucket.spans[index]
            self.ops.subtract(slots[feedback.RESIDUAL][start:stop], overflow, -1.0)
        for start, stop in self._spans_of(unused):
            for slot in feedback.slot_names(self.method):
                self.ops.write(slots[slot][start:stop], self.state.slots[slot][start:stop], 1.0)
        return slots, members

    def _sent(self) -> tuple[list[Array] | None, int]:
        totals: list[Any] = [reduced.total for reduced in self.reduced]
        if not all(isinstance(total, Sparse | Shares) for total in totals):
            return None, 1
        shares = [list(total.each) if isinstance(total, Shares) else [total] for total in totals]
        return [self.ops.concat([share.index for share in each]) for each in shares], max(map(len, shares))

    def _puts_back(self) -> bool:
        return any(map(self.ops.max_abs, self._overflow.values()))

    def close(self) -> None:
        """End the exchange after the commit."""
        self._expect(Stage.DELIVERED)
        # Counters and lengths become visible only now, because an abandoned step must leave no trace
        counters = self.work.counters
        for _, work in self.per_tensor:
            for name, count in work.counters.items():
                counters[name] = counters.get(name, 0) + count
        if not self.paused:
            self.memory.lengths |= self._lengths
            if len(self.method.phases) > 1 and self.rank_state.next_step(self.bucket).phase != self.ctx.phase:
                self.memory.lengths.clear()  # a later phase may have other payload lengths
            if any(reduced.trigger for reduced in self.reduced):
                self.rank_state.trigger_requests.add(self.name)
        self.stage = Stage.CLOSED
        self._report_commit(counters)

    def abandon(self, fill: bool = False) -> None:
        """End the exchange without effect; see :meth:`Part.abandon`."""
        super().abandon(fill)
        self.stage = Stage.CLOSED
        # Closing the generator frees the buffers that its frame refers to
        if self._communication:
            self._communication.close()

    # -- descriptions for messages --------------------------------------------------------------------------

    def wrap_error(self, error: Exception) -> ExchangeError:
        """Wrap an exception from the method with the tensor, round and rank."""
        name = self._fused.current if self._fused else self.name
        local = self.rank_state
        who = f"rank {local.rank}" if local.nodes is None else f"rank {local.rank}, node {self.group.rank}"
        where = f"method {self.method.id}, round {max(self.round, 0)}, {who}"
        return ExchangeError(f"tensor {name!r} ({where}): {type(error).__name__}: {error}")

    def _record_codec_time(self, seconds: float) -> None:
        """Report codec time to the observers: encoding until the last collective, decoding after it."""
        local = self.rank_state
        for observer in local.observers:
            if self.stage < Stage.REDUCED:
                observer.encoded(local.rank, self.name, seconds)
            else:
                observer.decoded(local.rank, self.name, seconds)
