"""A bucket in one step, from its gradients and its old state to its new one; and the commit: all new states or none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from enum import IntEnum
from typing import Any

from hvdcompress.engine.bucket_state import BucketState
from hvdcompress.engine.collectives import Pending
from hvdcompress.engine.late import RENEWED, Late, stamp_of
from hvdcompress.engine.state import RankState
from hvdcompress.method import Array
from hvdcompress.ops.spec import Ops
from hvdcompress.parts import momentum
from hvdcompress.plan import Bucket

Slots = dict[str, Array]


class Stage(IntEnum):
    """Stage of an exchange."""

    FILLING = 0
    RUNNING = 1
    REDUCED = 2
    DELIVERED = 3
    CLOSED = 4


class Part:
    """A bucket in one step: from the state before the step to the state after it.

    A plain Part is a gradient that the driver's framework reduces itself, in place: the engine only counts its steps.

    Args:
        rank_state: this rank's state.
        bucket: the bucket.
        like: an array on the gradients' device, such as the first gradient.
        ops: the array ops of its library.

    Attributes:
        name: the name of the bucket.
        next_step: method and phase of the step.
        method: the method of the step.
        dtype: dtype of the computation, "float32" or "float64".
        paused: whether the step leaves the state unchanged.
        state: the state before the step.
        memory: the reused buffers of the bucket.
        begun_in: ``RankState.round`` at the beginning.
        stage: the current stage. A plain Part gets no gradients, so it waits in the first one for the commit.
        pending: the collective in flight, in stage RUNNING.
        counters: in stage CLOSED, what the method has counted.
        outs: arrays that receive the reduced gradients, one per tensor of the bucket; None where the driver keeps it.
        round: the index of the current collective, from 0; with two levels, at its level.
        late: after :meth:`new_state`, what the optimizer's momentum is adapted to; None if it is not adapted.

    Raises:
        ValueError: the shape of a tensor has changed.
    """

    def __init__(self, rank_state: RankState, bucket: Bucket, like: Array, ops: Ops):
        self.rank_state = rank_state
        self.bucket = bucket
        self._note_begun()
        self.like = like
        self.ops = ops
        self.name = bucket.spec.name
        self.next_step = rank_state.next_step(bucket)
        self.method = self.next_step.method
        self.dtype = self.next_step.dtype
        self.paused = rank_state.uncompressed
        self.state = state = self.next_step.state or self._first_state()
        self.memory = rank_state.memory[self.name]
        self.begun_in = rank_state.round
        self.outs: list[Any] = [None] * len(bucket.members)
        self.late: Late | None = None
        self.round = -1
        self.stage = Stage.FILLING
        self.counters: Counter[str] = Counter()
        self.pending: Pending | None = None
        self._received = bytearray(len(bucket.members))
        for before, now in zip(state.bucket.members, bucket.members, strict=True) if state.bucket is not bucket else ():
            if before.shape != now.shape:
                raise ValueError(f"tensor {now.name!r} had shape {before.shape} before and has {now.shape} now")

    def _note_begun(self) -> None:
        self.rank_state.note_begun(self.bucket)

    def _first_state(self) -> BucketState:
        return BucketState.zeros(self.bucket, self.like, self.ops)

    # -- the gradients --------------------------------------------------------------------------------------

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

    def _take(self, indices: Sequence[int], gradients: Sequence[Array]) -> None:
        """Take over gradients whose :attr:`outs` are known."""
        raise NotImplementedError

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

    # -- the new state --------------------------------------------------------------------------------------

    def new_state(self, unused: Collection[str] = ()) -> BucketState:
        """Return the state after the step, and set :attr:`late`.

        Args:
            unused: names of the tensors whose results no rank uses. They keep their residual and velocity.
        """
        if self.paused:
            return self.state
        slots, members = self.new_slots(unused)
        return BucketState(
            self.bucket,
            slots,
            members,
            self._note_sent(unused),
            self.state.step + 1,
            self.state.triggers,
            self.next_step.restart,
            self._is_flushed(unused),
        )

    def new_slots(self, unused: Collection[str]) -> tuple[Slots, tuple[Slots, ...]]:
        """Return ``slots`` and ``members`` of the state after the step."""
        return self.state.slots, self.state.members

    def _sent(self) -> tuple[list[Array] | None, int]:
        """Return the elements that were sent, in order of the ranks, and how many ranks have selected them."""
        return None, 1

    def _note_sent(self, unused: Collection[str]) -> Array | None:
        """Set :attr:`late`, and return ``BucketState.arrived`` after the step."""
        method = self.method
        if not momentum.adapts(method):
            return None
        sent, ranks = self._sent()
        indices, spread = sent, 1.0
        if sent and ranks > 1:
            # Once each and ascending, so that the optimizer reads and writes its buffer once, and tensors have parts
            sizes = [member.size for member in self.bucket.members] if len(sent) > 1 else [self.bucket.spec.size]
            indices = [self.ops.distinct(*each) for each in zip(sent, sizes, strict=True)]
            different = sum(map(len, indices))
            spread = max(1.0, round(8 * ranks * different / sum(map(len, sent))) / 8) if different else 1.0
        elif sent:
            indices = [self.ops.sort(index) for index in sent]
        by_age = method.sparse and not momentum.at_once(method) and self.rank_state.tracks_ages is not False
        if indices is None or not by_age:
            self.late = Late(self.bucket, method, indices, spread=spread)
            return None
        step = self.state.step
        before: Any = self.state.arrived
        if before is None:  # as if every element had been sent in the last step
            before = self.ops.zeros(self.bucket.spec.size, "int8", indices[0])
            before[:] = stamp_of(step)
        arrived: Any = self.memory.second_buffer("arrived", before, "int8", self.ops)
        spans = self.bucket.spans if len(indices) > 1 else [(0, self.bucket.spec.size)]
        now = stamp_of(step + 1)
        ages = [
            self.ops.stamp(before[start:stop], now, index, arrived[start:stop])
            for index, (start, stop) in zip(indices, spans, strict=True)
        ]
        for start, stop in self._spans_of(unused):
            arrived[start:stop] = before[start:stop] + 1  # without a gradient, no element waits longer
        # A stamp is the step modulo 256. Renew old ones before they would look like recent ones
        if step % RENEWED == 0:
            arrived[now - arrived > momentum.MAX_WAIT] = stamp_of(step + 1 - momentum.MAX_WAIT)
        self.late = Late(self.bucket, method, indices, ages, spread)
        return arrived

    def _spans_of(self, names: Collection[str]) -> list[tuple[int, int]]:
        """Return the spans of the tensors with these names in the bucket."""
        pairs = zip(self.bucket.members, self.bucket.spans, strict=True) if names else ()
        return [span for member, span in pairs if member.name in names]

    def _is_flushed(self, unused: Collection[str]) -> bool:
        """Return ``BucketState.flushed`` after the step."""
        if self.state.flushed or not self.rank_state.fallback.flushes_all:
            return self.state.flushed
        return not (self._puts_back() or any(member.name in unused for member in self.bucket.members))

    def _puts_back(self) -> bool:
        """Return whether the range of float16 has put a part of the results back into the residuals.

        With two levels, the other ranks of the node do not know, so float16 gradients always wait.
        """
        return bool(self.rank_state.nodes) and self.bucket.spec.dtype == "float16"

    def describe_wait(self, count: int = 1) -> str:
        """Describe the collective that this rank waits for. ``count`` is the number of buckets that wait."""
        more = f", and {count - 1} more" if count > 1 else ""
        return f"tensor {self.name!r} (method {self.method.id}, round {max(self.round, 0)}{more})"

    def close(self) -> None:
        """End after the commit."""
        self.stage = Stage.CLOSED
        for observer in self.rank_state.observers:
            observer.committed(self.rank_state.rank, self.name, self.counters)

    def abandon(self, fill: bool = False) -> None:
        """End without effect.

        Args:
            fill: whether to fill the results with NaN.
        """
        self.stage = Stage.CLOSED
        for out in self.outs if fill else ():
            if out is not None:
                out[...] = float("nan")


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
        part.state = new.get(part.name, part.state)  # a TensorFlow graph may contain several steps of one tensor
        new[part.name] = part.new_state(unused)
    rank_state.swap(new, min((part.begun_in for part in parts), default=None))
    rank_state.late |= {part.name: part.late for part in parts if part.late}
    for part in parts:
        part.close()
    if triggered:
        rank_state.restart(new.keys() if per_bucket else rank_state.states.keys())
