"""What one exchange works with: fixed when it begins, and shared by its parts."""

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
    """What one exchange works with.

    Args:
        local: this rank's state.
        group: the ranks that take part.
        bucket: the tensors that are exchanged in one go.
        like: an array on the device of the gradients, such as the first of them.
        ops: the array ops of their library.
        loss_scale: what the loss was multiplied by; residuals are kept unscaled.

    Attributes:
        next_step: what the program says for this step.
        method: the method of this step.
        state: the state that the exchange begins with.
        memory: buffers that are reused.
        dtype: the dtype of the computation.
        scale: what gradients are multiplied by as they come in.
        with_feedback: whether the method has error feedback.
        feedback: the slots, and the second buffers that receive the new values of the feedback's slots.
        ctx: the context of the bucket.
        work: the workspace of the bucket.
        each: where the method runs on each tensor, the context and the workspace of each; otherwise empty.
        paused: whether the state stays as it is.
        begun_in: ``RankState.round``.

    Raises:
        ValueError: a tensor had another shape before.
    """

    def __init__(self, local: RankState, group: Group, bucket: Bucket, like: Array, ops: Ops, loss_scale: float = 1.0):
        self.local = local
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
        # State is kept unscaled. A method without state need not unscale.
        self.scale = 1.0 / loss_scale if loss_scale != 1.0 and feedback.slots(method, bucket.spec) else 1.0
        self.with_feedback = method.feedback != "none"
        spare = {slot: memory.second_buffer(slot, state.slots[slot], "float32", ops) for slot in feedback.names(method)}
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
            self.group.world,
            state.step,
            spec,
            self.local.plan.seed,
            self.next_step.phase,
            state.triggers,
            self.with_feedback,
        )

    def _tensor_workspaces(self) -> list[tuple[Context, Workspace]]:
        # This runs for every tensor in every step
        bucket, of_member = self.bucket, self.memory.of_member
        return [
            (self._context(member), Workspace(self.ops, of_member(index), bucket=self.work, span=span))
            for index, (member, span) in enumerate(zip(bucket.members, bucket.spans, strict=True))
        ]

    def fuse(self) -> FusedCommunication | None:
        """Return the communications of the tensors as one; None where the method runs on the whole bucket."""
        if not self.per_tensor:
            return None
        buffer = functools.partial(self.work.buffer, like=self.like)
        return FusedCommunication([member.name for member in self.bucket.members], self.group, self.ops, buffer)
