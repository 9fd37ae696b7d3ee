"""What a rank keeps of one bucket between steps, as a value.

Nobody writes to the arrays of a :class:`BucketState`. A step builds new arrays in second buffers, which
:class:`Memory` owns, and a commit swaps the whole value. So an error, a NaN or ``discard()`` needs no undoing: the
value of before is still there.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from math import prod

import numpy as np

from hvdcompress.engine.pieces import Pieces, slots_of
from hvdcompress.method import Array, Slot
from hvdcompress.ops.spec import Ops
from hvdcompress.parts import feedback
from hvdcompress.plan import Bucket


@dataclass(frozen=True, eq=False)
class MomentumState:
    """What is known about the optimizer's momentum buffer; ``engine/momentum.py`` uses it.

    Attributes:
        content: what the buffer contains of gradients whose momentum is cancelled. Empty for nothing.
        before: the content before the last exchange, in case the optimizer skips the step. A dense one may be
            overwritten by the next exchange that finds that the optimizer has not skipped it.
        arrived: the step in which each element last arrived, modulo 2^8, [size] int8; None where none is kept.
        updates: ``Momentum.updates`` of each tensor at the last exchange; empty for none.
        foreign: of each tensor, whether the result of the last exchange is not in ``content``, because the gradient was
            averaged in a pause, or because no rank uses the result. Empty for none.
    """

    content: Pieces = ()
    before: Pieces = ()
    arrived: Array | None = None
    updates: tuple[int | None, ...] = ()
    foreign: tuple[bool, ...] = ()


@dataclass(frozen=True, eq=False)
class BucketState:
    """One bucket's state on one rank.

    Attributes:
        bucket: the tensors that are exchanged in one go.
        slots: the value of each declared slot, flat.
        members: of a bucket whose method runs on each tensor, the slots that it declares for each.
        momentum: what is known about the optimizer's momentum buffer.
        step: number of exchanges.
        triggers: how often all ranks agreed to restart the method's schedule.
        restart: (triggers acted upon, the step of the last of them).
    """

    bucket: Bucket
    slots: dict[str, Array]
    members: tuple[dict[str, Array], ...] = ()
    momentum: MomentumState = MomentumState()
    step: int = 0
    triggers: int = 0
    restart: tuple[int, int] = (0, 0)

    @classmethod
    def zeros(cls, bucket: Bucket, like: Array, ops: Ops) -> BucketState:
        """Return the state before the first step; ``like`` is an array on the device."""

        def zeros(declared: Mapping[str, Slot]) -> dict[str, Array]:
            return {name: ops.zeros(prod(slot.shape), slot.dtype, like) for name, slot in declared.items()}

        return cls(bucket, zeros(declared_slots(bucket)), tuple(map(zeros, declared_by_members(bucket))))

    def arrays(self) -> list[Array]:
        """Return every array of the state."""
        pieces = [*self.momentum.content, *self.momentum.before]
        found = [*self.slots.values(), *(array for own in self.members for array in own.values())]
        found += [array for piece in pieces for array in slots_of(piece).values()]
        return found if self.momentum.arrived is None else [*found, self.momentum.arrived]


@dataclass(eq=False)
class Memory:
    """Memory of one bucket that is reused from step to step, because fresh memory is expensive. It is not state.

    Attributes:
        scratch: arrays that the method uses within a step, by name.
        members: of a bucket whose method runs on each tensor, the same for each.
        joined: the gradients of all tensors one after another; None if it was not needed yet.
        lengths: of all-gathers of fixed length, by ``Exchange.call``, the length of all ranks' payloads in the phase.
    """

    scratch: dict[str, Array] = field(default_factory=dict)
    members: list[dict[str, Array]] = field(default_factory=list)
    flat: Array | None = None
    lengths: dict[Hashable, int] = field(default_factory=dict)
    _pairs: dict[str, tuple[Array, Array]] = field(default_factory=dict)  # of slots, the buffers that take turns

    def second_buffer(self, slot: str, current: Array, dtype: str, ops: Ops) -> Array:
        """Return the buffer that a step writes the new value of a slot to: not the one that holds the current value."""
        # By identity, and not in turn: after discard() the current array is the same as two steps ago
        for buffer in self._pairs.get(slot, ()):
            if buffer is not current and len(buffer) == len(current):
                return buffer
        buffer = ops.zeros(len(current), dtype, like=current)
        self._pairs[slot] = (current, buffer)
        return buffer

    def flat_buffer(self, size: int, dtype: str, like: Array, ops: Ops) -> Array:
        """Return the buffer for the gradients of all tensors."""
        if self.flat is None or itemsize(dtype) * size != self.flat.nbytes:
            self.flat = ops.zeros(size, dtype, like)
        return self.flat

    def of_member(self, index: int) -> dict[str, Array]:
        """Return the scratch arrays of one tensor."""
        while len(self.members) <= index:
            self.members.append({})
        return self.members[index]

    def clear_scratch(self) -> None:
        """Drop the scratch arrays, where a collective of a failed step may still write."""
        self.scratch.clear()
        self.members.clear()

    def arrays(self) -> list[Array]:
        """Return every array, those of the current state included."""
        pairs = [array for pair in self._pairs.values() for array in pair]
        scratch = [array for each in (self.scratch, *self.members) for array in each.values()]
        return [*pairs, *scratch] if self.flat is None else [*pairs, *scratch, self.flat]


def declared_slots(bucket: Bucket) -> dict[str, Slot]:
    """Return every slot of the bucket as a whole that any stage of its program declares."""
    declared: dict[str, Slot] = {}
    for _, method in bucket.program.stages:
        if bucket.runs_per_tensor(method):
            declared.update({name: Slot((bucket.spec.size,)) for name in feedback.names(method)})
        else:
            declared.update(feedback.slots(method, bucket.spec))
    return declared


def declared_by_members(bucket: Bucket) -> list[dict[str, Slot]]:
    """Return every slot of each tensor by itself; an empty list where there are none."""
    methods = [method for _, method in bucket.program.stages if bucket.runs_per_tensor(method)]
    if not methods:
        return []
    return [{k: slot for method in methods for k, slot in method.state(spec).items()} for spec in bucket.members]


def itemsize(dtype: str) -> int:
    """Return the bytes of an element."""
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
