"""Intake of gradients: the one pass over memory that each gradient makes when it enters an exchange.

The pass adds the residual, checks for Inf and NaN, and computes the statistics that the method requests
(``Method.scan``). It processes about a million elements at a time, while they are in the CPU cache; on a device, and
for many small gradients, the whole bucket in one go.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np

from hvdcompress.engine.collectives import Pending
from hvdcompress.engine.commit import Part
from hvdcompress.engine.fused import FusedCommunication
from hvdcompress.engine.state import RankState
from hvdcompress.engine.transport import Group
from hvdcompress.method import Array, Context, TensorSpec, Workspace
from hvdcompress.ops.scan import NOTHING, Found
from hvdcompress.ops.spec import Ops
from hvdcompress.ops.vectors import Flag, both
from hvdcompress.parts import feedback
from hvdcompress.plan import Bucket

TILE = 1 << 20  #: elements processed in one go: as many as the CPU cache holds
SMALL = 1 << 12  #: elements; if the mean gradient is smaller, one call per gradient costs more than a concatenation


class Stage(IntEnum):
    """Stage of an exchange."""

    FILLING = 0
    RUNNING = 1
    REDUCED = 2
    DELIVERED = 3
    CLOSED = 4


class Intake(Part, ABC):
    """An exchange in its first stage, in which gradients arrive; see :class:`Part` for the arguments.

    Attributes:
        stage: the current stage.
        pending: the collective in flight, in stage RUNNING.
    """

    def __init__(self, rank_state: RankState, bucket: Bucket, like: Array, ops: Ops):
        super().__init__(rank_state, bucket, like, ops)
        self.stage = Stage.FILLING
        self.pending: Pending | None = None
        self._received = bytearray(len(bucket.members))

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
            member = self.bucket.members[index]
            if len(gradient) != member.size:
                raise ValueError(f"tensor {member.name!r} has {member.size} elements, its gradient has {len(gradient)}")
            if self._received[index]:
                raise ValueError(f"tensor {member.name!r} got a second gradient in the same step")
        # Check all gradients before accepting any, so that an error leaves the exchange unchanged
        for index, out in zip(indices, gradients if outs is None else outs, strict=True):
            self.outs[index] = out
            self._received[index] = True
        self._take(indices, gradients)

    @abstractmethod
    def _take(self, indices: Sequence[int], gradients: Sequence[Array]) -> None:
        """Take over gradients whose :attr:`outs` are known."""

    @property
    def is_full(self) -> bool:
        """Whether all gradients have been added."""
        return 0 not in self._received

    def _missing(self) -> list[int]:
        """Return the indices of the tensors without a gradient so far."""
        return [index for index, received in enumerate(self._received) if not received]

    def fill_missing(self) -> None:
        """Add zeros for the tensors that have no gradient on this rank."""
        missing = self._missing()
        sizes = [self.bucket.members[index].size for index in missing]
        self.add(missing, [self.ops.zeros(size, self.dtype, self.like) for size in sizes])

    def describe_missing(self) -> str:
        """Name the gradients that have not been added."""
        names = ", ".join(repr(self.bucket.members[index].name) for index in self._missing())
        return f"bucket {self.name!r} is incomplete: no gradient of {names} was added"

    def start(self) -> None:
        """Begin stage RUNNING, with the first collective.

        Raises:
            ExchangeError: the method failed.
            RuntimeError: a gradient is missing.
        """
        self._expect(Stage.FILLING)
        if not self.is_full:
            raise RuntimeError(self.describe_missing())
        self.stage = Stage.RUNNING

    def _expect(self, stage: Stage) -> None:
        """Check the stage. A wrong stage is a bug in a driver.

        Raises:
            RuntimeError: the exchange is in another stage.
        """
        if self.stage is not stage:
            raise RuntimeError(
                f"the exchange of bucket {self.name!r} is in stage {self.stage.name}, expected {stage.name}"
            )


class MethodIntake(Intake):
    """The intake of an exchange that runs a method: adds up gradients and residuals.

    If the method runs on each tensor, it starts on a tensor as soon as its gradient is processed.

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
        x: the vector to exchange [n]: gradient + residual, or the gradient; None until gradients were processed.
        finite: whether all gradients so far are free of Inf and NaN: a bool, or a tensor of one element on a device.
    """

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
        self.work = Workspace(ops, memory.scratch, span=(0, bucket.spec.size))
        self.per_tensor: Sequence[tuple[Context, Workspace]] = ()
        self._fused: FusedCommunication | None = None
        if bucket.automatic and method.granularity == "tensor":
            # A hot loop: it runs for every tensor in every step
            self.per_tensor = [
                (self._context(member), Workspace(ops, memory.members[index], bucket=self.work, span=span))
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
        for index, gradient in zip(indices, gradients, strict=True):
            self._waiting[index] = gradient
            self._num_waiting += len(gradient)
        if not self.is_full and (self.at_once or self._num_waiting < TILE):
            return
        # Reset first: if the method raises an exception, the gradients must not be processed again
        waiting = self._waiting
        self._waiting = {}
        self._num_waiting = 0
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
            self.x = self.feedback.spare[feedback.RESIDUAL]
        else:
            x, found = self._scan(gradient, 0, state, ctx, work)
            self.x = x
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
        ops = self.ops
        scan = NOTHING
        # The scan would see values before the multiplication by the loss scale, which the method never sees
        if index is not None and self.scale == 1.0:
            scan = self.method.scan(index, state, ctx, work, gradient)
        found = ops.inspect(gradient, scan)
        # ``finite`` is a tensor on a device, and then _zero_nonfinite() applies it there
        if found.finite is False:
            gradient = ops.zeros(len(gradient), self.dtype, like=gradient)
            found = ops.inspect(gradient, scan)._replace(finite=False)
        return gradient if self.scale == 1.0 else gradient * np.float32(self.scale), found

    def _zero_nonfinite(self, finite: Flag, x: Array, span: slice) -> None:
        """Replace a non-finite gradient in x by zeros, if only the device knows whether it is finite."""
        if isinstance(finite, bool):
            return
        residual = self.state.slots[feedback.RESIDUAL][span] if self.with_feedback else None
        self.ops.keep_if(finite, x, residual)
