"""Inputs of one exchange: its method, state, buffers and context. They are fixed when the exchange begins."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from hvdcompress.engine.fused import FusedCommunication
from hvdcompress.engine.state import RankState
from hvdcompress.engine.transport import Group
from hvdcompress.method import Array, Context, TensorSpec, Workspace
from hvdcompress.ops.scan import Found
from hvdcompress.ops.spec import Ops
from hvdcompress.parts import feedback
from hvdcompress.plan import Bucket


class Setup:
    """Inputs of one exchange, fixed when it begins.

    Args:
        local: this rank's state.
        group: the ranks that take part.
        bucket: the bucket.
        like: an array on the gradients' device, such as the first gradient.
        ops: the array ops of the gradients' library.
        loss_scale: the factor by which the loss was multiplied.

    Attributes:
        next_step: method and phase of this step.
        method: the method of this step.
        state: the state before the exchange.
        memory: the reused buffers of the bucket.
        dtype: dtype of the computation, "float32" or "float64".
        scale: factor of arriving gradients: 1 / loss scale if the method has state, otherwise 1.
        with_feedback: whether the method has error feedback.
        feedback: the error feedback of the bucket, with the second buffers for its new slots.
        ctx: the context of the bucket.
        work: the workspace of the bucket.
        per_tensor: (context, workspace) of each tensor if the method runs on each tensor; otherwise empty.
        paused: whether the step leaves the state unchanged.
        begun_in: ``RankState.round`` at the beginning of the exchange.

    Raises:
        ValueError: the shape of a tensor has changed.
    """

    def __init__(self, local: RankState, group: Group, bucket: Bucket, like: Array, ops: Ops, loss_scale: float = 1.0):
        self.rank_state = local
        self.group = group
        self.bucket = bucket
        self.like = like
        self.ops = ops
        self.next_step = planned = local.next_step(bucket)
        self.method = method = planned.method
        self.state = state = local.state_of(planned, like, ops)
        local.note_begun(bucket)
        self.begun_in = local.round
        self.paused = local.uncompressed
        self.memory = memory = local.memory_of(bucket.spec.name)
        self.dtype = planned.dtype
        # Loss scales change, so state is kept unscaled. A method without state can skip the division.
        self.scale = 1.0 / loss_scale if loss_scale != 1.0 and feedback.slots(method, bucket.spec) else 1.0
        self.with_feedback = method.feedback != "none"
        spare = {
            slot: memory.second_buffer(slot, state.slots[slot], "float32", ops) for slot in feedback.slot_names(method)
        }
        self.feedback = feedback.Feedback(method, state.slots, spare, self.scale)
        self.ctx = self._context(bucket.spec)
        self.work = Workspace(ops, memory.scratch, span=(0, bucket.spec.size))
        self.per_tensor: Sequence[tuple[Context, Workspace]] = ()
        if bucket.automatic and method.granularity == "tensor":
            self.per_tensor = self._tensor_workspaces()
        else:
            self.work.scanned = [Found(True)] * len(bucket.members)

    def _context(self, spec: TensorSpec) -> Context:
        state = self.state
        return Context(
            self.group.rank,
            self.group.world_size,
            state.step,
            spec,
            self.rank_state.plan.seed,
            self.next_step.phase,
            state.triggers,
            self.with_feedback,
        )

    def _tensor_workspaces(self) -> list[tuple[Context, Workspace]]:
        # A hot loop: it runs for every tensor in every step
        bucket = self.bucket
        of_member = self.memory.of_member
        return [
            (self._context(member), Workspace(self.ops, of_member(index), bucket=self.work, span=span))
            for index, (member, span) in enumerate(zip(bucket.members, bucket.spans, strict=True))
        ]

    def fuse(self) -> FusedCommunication | None:
        """Return a fused communication for the tensors; None if the method runs on the bucket as a whole."""
        if not self.per_tensor:
            return None
        buffer = functools.partial(self.work.buffer, like=self.like)
        return FusedCommunication([member.name for member in self.bucket.members], self.group, self.ops, buffer)
