"""Commit of a step: keep all new states, or none."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

from hvdcompress.engine.bucket_state import BucketState
from hvdcompress.engine.late import Late
from hvdcompress.engine.state import RankState
from hvdcompress.method import Array
from hvdcompress.ops.spec import Ops
from hvdcompress.plan import Bucket


class Part(Protocol):
    """A bucket in one step: an exchange that was delivered, or a :class:`PassedThrough`.

    Attributes:
        name: the name of the bucket.
        begun_in: ``RankState.round`` at the beginning.
        late: after :meth:`new_state`, what the optimizer's momentum is adapted to; None if it is not adapted.
    """

    name: str
    begun_in: int
    late: Late | None

    @property
    def state(self) -> BucketState:
        """The state before the step."""

    def new_state(self, before: BucketState, unused: Collection[str] = ()) -> BucketState:
        """Return the state after the step. ``before`` is the state, unless the step has the bucket twice."""

    def close(self) -> None:
        """End after the commit."""

    def abandon(self, fill: bool = False) -> None:
        """End without effect; fill the results with NaN on request."""


class PassedThrough:
    """A gradient that the driver's framework reduces itself, in place; the engine only counts its steps.

    Args:
        rank_state: this rank's state.
        bucket: a bucket whose next step ``passes_through``.
        like: an array on the gradient's device.
        ops: the array ops of its library.
        gradient: the PyTorch tensor that the framework reduces; None if the driver fills results with NaN itself.
    """

    def __init__(self, rank_state: RankState, bucket: Bucket, like: Array, ops: Ops, gradient: Any = None):
        self.rank_state = rank_state
        self.gradient = gradient
        self.name = bucket.spec.name
        self.next_step = rank_state.next_step(bucket)
        rank_state.note_begun(bucket)
        self.state = rank_state.state_of(self.next_step, like, ops)
        self.begun_in = rank_state.round
        self.late: Late | None = None

    def new_state(self, before: BucketState, unused: Collection[str] = ()) -> BucketState:
        """Return the state after the step."""
        new, self.late = self.rank_state.progressed(self.next_step, before, unused)
        return new

    def close(self) -> None:
        """Report the commit."""
        self.rank_state.note_committed(self.name)

    def abandon(self, fill: bool = False) -> None:
        """Fill the gradient with NaN on request."""
        if fill and self.gradient is not None:
            self.gradient.fill_(float("nan"))


def commit_step(
    rank_state: RankState,
    parts: Sequence[Part],
    finite: bool = True,
    triggered: bool = False,
    unused: Collection[str] = (),
    per_bucket: bool = False,
) -> None:
    """Replace the states by the new ones, or fill the results with NaN. The arguments are equal on all ranks.

    Args:
        rank_state: this rank's state.
        parts: the buckets of the step.
        finite: whether no rank had an Inf or a NaN.
        triggered: whether the ranks agreed to restart the phases of their methods.
        unused: names of the tensors whose results no rank uses; their state is kept as it was.
        per_bucket: whether a trigger restarts only these buckets. TensorFlow needs it, because there the ranks agree on
            each tensor separately.
    """
    # A tensor must be known from its first step on, even if this step has a NaN or is discarded: otherwise ranks would
    # disagree on which tensors exist.
    rank_state.put(part.state for part in parts if part.name not in rank_state.states)
    for part in parts:
        rank_state.late.pop(part.name, None)  # in place: under TensorFlow, steps of other tensors take theirs meanwhile
    if not finite:
        for part in parts:
            part.abandon(fill=True)
        return
    # All new states are built before the first one is stored, so that an exception leaves the step without effect.
    new: dict[str, BucketState] = {}
    for part in parts:
        # A TensorFlow graph may contain several steps of one tensor, hence the lookup in ``new``.
        new[part.name] = part.new_state(new.get(part.name) or rank_state.states[part.name], unused)
    rank_state.swap(new, min((part.begun_in for part in parts), default=None))
    rank_state.late |= {part.name: part.late for part in parts if part.late}
    for part in parts:
        part.close()
    if triggered:
        rank_state.restart(new.keys() if per_bucket else rank_state.states.keys())
