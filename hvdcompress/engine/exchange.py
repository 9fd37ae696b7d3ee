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

import functools
import time
from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np

from hvdcompress.engine.collectives import by_rank, require_collective
from hvdcompress.engine.commit import Part, Slots, Stage
from hvdcompress.engine.fused import FusedCommunication
from hvdcompress.engine.state import RankState
from hvdcompress.engine.telemetry.observer import Completed
from hvdcompress.engine.transport import Group
from hvdcompress.method import (
    AllGather,
    Array,
    Broadcast,
    Collective,
    Communication,
    Context,
    Reduced,
    Sparse,
    TensorSpec,
    Workspace,
)
from hvdcompress.ops.scan import NOTHING, Found
from hvdcompress.ops.spec import Ops
from hvdcompress.ops.vectors import FP16_MAX, Flag, Outer, Shares, Spectra, both
from hvdcompress.parts import feedback
from hvdcompress.plan import Bucket

TILE = 1 << 20  #: elements processed in one go: as many as the CPU cache holds
SMALL = 1 << 12  #: elements; if the mean gradient is smaller, one call per gradient costs more than a concatenation
VARIABLE_LENGTH_HINT = "; if lengths may differ, set `variable_length = True` or yield AllGather(fixed_length=False)"


class ExchangeError(RuntimeError):
    """The method of an exchange failed. The message names the tensor, the method, the round and the rank."""


class Exchange(Part):
    """One bucket in one step under a method, from its gradients to its new state.

    In its first stage it makes the one pass over memory that each gradient makes when it arrives. The pass adds the
    residual, checks for Inf and NaN, and computes the statistics that the method requests (``Method.scan``). It
    processes about a million elements at a time, while they are in the CPU cache; on a device, and for many small
    gradients, the whole bucket in one go. If the method runs on each tensor, it starts on a tensor as soon as its
    gradient is processed.

    Args:
        rank_state: this rank's state.
        group: the ranks that take part.
        bucket: the bucket.
        like: an array on the gradients' device, such as the first gradient.
        ops: the array ops of the gradients' library.
        loss_scale: the factor by which the loss was multiplied.

    Attributes:
        scale: factor of arriving gradients: 1 / loss scale if the method has state, otherwise 1.
        with_feedback: whether the method has error feedback.
        feedback: the error feedback of the bucket, with the second buffers for its new slots.
        ctx: the context of the bucket.
        work: the workspace of the bucket.
        per_tensor: (context, workspace) of each tensor if the method runs on each tensor; otherwise empty.
        at_once: whether all gradients of the bucket are processed at once.
        x: the vector to exchange [n]: gradient + residual, or the gradient; None until gradients were processed, and
            if the method runs on each tensor.
        finite: whether all gradients so far are free of Inf and NaN: a bool, or a tensor of one element on a device.
        collective: in stage RUNNING, the collective whose result the method needs next.
        reduced: from stage REDUCED on, the results of the method: one for the bucket, or one per tensor if the method
            runs on each tensor.
    """

    level: Literal["between"] = "between"  #: with two levels, the level of the collectives

    def __init__(
        self, rank_state: RankState, group: Group, bucket: Bucket, like: Array, ops: Ops, loss_scale: float = 1.0
    ):
        super().__init__(rank_state, bucket, like, ops)
        self.group = group
        method = self.method
        memory = self.memory
        slots = self.state.slots
        # Loss scales change, so state is kept unscaled. A method without state can skip the division.
        self.scale = 1.0 / loss_scale if loss_scale != 1.0 and feedback.slots(method, bucket.spec) else 1.0
        self.with_feedback = method.feedback != "none"
        spare = {slot: memory.second_buffer(slot, slots[slot], "float32", ops) for slot in feedback.slot_names(method)}
        self.feedback = feedback.Feedback(method, slots, spare, self.scale)
        self.ctx = self._context(bucket.spec)
        self.work = Workspace(ops, memory.scratch[None], span=(0, bucket.spec.size))
        self.per_tensor: Sequence[tuple[Context, Workspace]] = ()
        self._fused: FusedCommunication | None = None
        if bucket.automatic and method.granularity == "tensor":
            # A hot loop: it runs for every tensor in every step
            self.per_tensor = [
                (self._context(member), Workspace(ops, memory.scratch[index], bucket=self.work, span=span))
                for index, (member, span) in enumerate(zip(bucket.members, bucket.spans, strict=True))
            ]
            buffer = functools.partial(self.work.buffer, like=like)
            self._fused = FusedCommunication([member.name for member in bucket.members], group, ops, buffer)
        else:
            self.work.scanned = [Found(True)] * len(bucket.members)
        self.at_once = self._suits_at_once()
        self.x: Array | None = None
        self.finite: Flag = True
        self._waiting: dict[int, Array] = {}  # gradients that are not processed yet, by the index of their tensor
        self._num_waiting = 0  # their elements
        self.collective: Collective | None = None
        self.reduced: list[Reduced] = []
        self._communication: Communication | FusedCommunication | None = self._fused
        self._lengths: dict[Hashable, int] = {}  # fixed payload lengths to add to Memory.lengths on commit
        # {index of a tensor: the part of its result that float16 cannot hold}, in the units of the residual
        self._overflow: dict[int, Array] = {}
        self._yielded_at = 0.0

    # -- FILLING --------------------------------------------------------------------------------------------

    def _context(self, spec: TensorSpec) -> Context:
        state = self.state
        seed = self.rank_state.plan.seed
        phase = self.next_step.phase
        return Context(*self.group, state.step, spec, seed, phase, state.triggers, self.with_feedback)

    def _suits_at_once(self) -> bool:
        """Return whether to process all gradients of the bucket at once.

        On a device, a kernel launch costs more than moving the memory. On the host this holds only for small gradients.
        """
        count = len(self.bucket.members)
        if count == 1 or self.per_tensor or self.method.local_clip_norm is not None:
            return False
        if not isinstance(self.like, np.ndarray):
            return True
        return self.method.identity and not self.with_feedback and self.bucket.spec.size < SMALL * count

    def _take(self, indices: Sequence[int], gradients: Sequence[Array]) -> None:
        """Process gradients, or let them wait for others."""
        waiting = self._waiting
        waiting.update(zip(indices, gradients, strict=True))
        self._num_waiting += sum(map(len, gradients))
        if self.is_full or not (self.at_once or self._num_waiting < TILE):
            # Reset first: if the method raises an exception, the gradients must not be processed again
            self._waiting = {}
            self._num_waiting = 0
            with self._codec():
                self._process_all(waiting)

    def _process_all(self, waiting: dict[int, Array]) -> None:
        if self.per_tensor:
            for index, gradient in waiting.items():
                self._begin(index, gradient)
            return
        if self.at_once:
            in_order = [waiting[index] for index in range(len(waiting))]
            # PyTorch's allocator reuses memory by itself, NumPy's does not
            buffer = self._flat_buffer() if isinstance(self.like, np.ndarray) else None
            self._process(None, [self.ops.concat(in_order, buffer)])
        else:
            self._process(list(waiting), list(waiting.values()))
        if self.is_full:
            assert self.x is not None
            self._zero_nonfinite(self.finite, self.x, slice(None))

    def _flat_buffer(self) -> Array:
        # The dtype changes if a schedule switches between methods that do and do not keep float64
        return self.work.buffer(f"gradients.{self.dtype}", self.bucket.spec.size, self.dtype, self.like)

    def _process(self, indices: list[int] | None, gradients: list[Array]) -> None:
        """Process gradients of a method that runs on the bucket.

        Args:
            indices: the indices of their tensors; None for one vector of all tensors.
            gradients: the gradients.
        """
        # One call for all gradients: a call has a fixed cost, and most gradients are small
        spans = [(0, self.bucket.spec.size)] if indices is None else [self.bucket.spans[index] for index in indices]
        if self.with_feedback:
            founds = self.feedback.receive(gradients, indices, spans, self.ctx, self.work)
            self.x = self.feedback.spare[feedback.RESIDUAL]
        else:
            each = zip([None] if indices is None else indices, gradients, spans, strict=True)
            founds = [self._process_plain(index, gradient, span) for index, gradient, span in each]
        scanned: Any = self.work.scanned
        for number, found in enumerate(founds):
            self.finite = both(self.finite, found.finite)
            if indices is not None:
                scanned[indices[number]] = found

    def _process_plain(self, index: int | None, gradient: Array, span: tuple[int, int]) -> Found:
        """Process a gradient without error feedback."""
        x, found = self._scan(gradient, index, self.state.slots, self.ctx, self.work)
        start, stop = span
        # With ``saturated`` set, the scan has already written the fp16 payload, so x is not needed
        if stop - start == self.bucket.spec.size or found.saturated is not None:
            self.x = x
            return found
        # Without feedback, x must not overwrite the gradients, which belong to the framework
        if self.x is None:
            self.x = self._flat_buffer()
        self.ops.write(self.x[start:stop], x, 1.0)
        return found

    def _begin(self, index: int, gradient: Array) -> None:
        """Process the gradient of one tensor and run the method on it to its first collective."""
        # Residuals of all tensors are slices of one array per bucket, and the method's own slots are per tensor
        ctx, work = self.per_tensor[index]
        where = slice(*self.bucket.spans[index])
        spare = {slot: buffer[where] for slot, buffer in self.feedback.spare.items()}
        state = {**self.state.members[index], **{slot: self.state.slots[slot][where] for slot in spare}}
        tensor = feedback.Feedback(self.method, state, spare, self.scale)
        if self.with_feedback:
            (found,) = tensor.receive([gradient], [0], [(0, len(gradient))], ctx, work)
            x = spare[feedback.RESIDUAL]
        else:
            x, found = self._scan(gradient, 0, state, ctx, work)
        work.scanned = [found]
        self.finite = both(self.finite, found.finite)
        self._zero_nonfinite(found.finite, x, where)
        assert self._fused is not None
        self._fused.begin(index, tensor.exchange(x, ctx, work))

    def _scan(
        self, gradient: Array, index: int | None, state: dict[str, Array], ctx: Context, work: Workspace
    ) -> tuple[Array, Found]:
        """Scan a gradient without a residual.

        Args:
            gradient: the gradient.
            index: index of the gradient among the parts of ``ctx.spec``; None if it covers several parts.
            state: the method's state.
            ctx: the method's context.
            work: the method's workspace.

        Returns:
            The vector for the method, and the scan result. A gradient with an Inf or a NaN becomes zeros.
        """
        scan = NOTHING
        # The scan would see values before the multiplication by the loss scale, which the method never sees
        if index is not None and self.scale == 1.0:
            scan = self.method.scan(index, state, ctx, work, gradient)
        found = self.ops.inspect(gradient, scan)
        # ``finite`` is a tensor on a device, and then _zero_nonfinite() applies it there
        if found.finite is False:
            gradient = self.ops.zeros(len(gradient), self.dtype, like=gradient)
            found = self.ops.inspect(gradient, scan)._replace(finite=False)
        return gradient if self.scale == 1.0 else gradient * np.float32(self.scale), found

    def _zero_nonfinite(self, finite: Flag, x: Array, span: slice) -> None:
        """Replace a non-finite gradient in x by zeros, if only the device knows whether it is finite."""
        if isinstance(finite, bool):
            return
        residual = self.state.slots[feedback.RESIDUAL][span] if self.with_feedback else None
        self.ops.keep_if(finite, x, residual)

    # -- RUNNING --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Run the method to its first collective; see :meth:`Part.start`."""
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
        with self._codec():
            try:
                self.collective = require_collective(self._communication.send(result))
                self.round += 1
            except StopIteration as stop:
                self.collective = None
                self.reduced = stop.value if self._fused else [stop.value]
                self.stage = Stage.REDUCED
        self._yielded_at = time.perf_counter()
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
        share = self.scale / (factor * self.group.world_size)
        # A residual adds up several steps, and a lossy method may round up, so a result can exceed the range of float16
        # although no gradient does. A sum can do so, too, and is then Inf
        is_average = share > 0.999 * self.scale and not self.method.identity
        with self._codec():
            if self.bucket.spec.dtype == "float16" and (self.with_feedback or is_average):
                results = [self.ops.zeros(len(out), "float32", like=out) for out in self.outs]
                self.write_totals(factor, results)
                self._limit(results, share)
            else:
                self.write_totals(factor, self.outs)
        self.stage = Stage.DELIVERED

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

    def new_slots(self, unused: Collection[str]) -> tuple[Slots, tuple[Slots, ...]]:
        """Return ``slots`` and ``members`` of the state after the step."""
        self._expect(Stage.DELIVERED)
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
        for work in (self.work, *(work for _, work in self.per_tensor)):
            self.counters.update(work.counters)
        if not self.paused:
            self.memory.lengths |= self._lengths
            if len(self.method.phases) > 1 and self.rank_state.next_step(self.bucket).phase != self.ctx.phase:
                self.memory.lengths.clear()  # a later phase may have other payload lengths
            if any(reduced.trigger for reduced in self.reduced):
                self.rank_state.trigger_requests.add(self.name)
        super().close()

    def abandon(self, fill: bool = False) -> None:
        """End the exchange without effect; see :meth:`Part.abandon`."""
        super().abandon(fill)
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

    @contextmanager
    def _codec(self) -> Iterator[None]:
        """Context manager for codec work: wrap its errors, and report its time to the observers.

        It counts as encoding until the last collective, and as decoding after it.
        """
        began = time.perf_counter()
        try:
            yield
        except Exception as error:
            raise self.wrap_error(error) from error
        seconds = time.perf_counter() - began
        local = self.rank_state
        for observer in local.observers:
            if self.stage < Stage.REDUCED:
                observer.encoded(local.rank, self.name, seconds)
            else:
                observer.decoded(local.rank, self.name, seconds)
