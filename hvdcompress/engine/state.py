"""What a rank keeps of a bucket between steps: its slots, second buffers, and where it is in its schedule."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from math import prod

import numpy as np

from hvdcompress.method import Array, Slot, Sparse
from hvdcompress.ops.vectors import Outer
from hvdcompress.parts import feedback
from hvdcompress.plan import Bucket

Piece = Sparse | Outer | Array  #: sparse for a sparse method, factors for a matrix of low rank, dense otherwise
Pieces = tuple[Piece, ...]  #: one for the whole bucket, or one for each tensor


@dataclass(eq=False)
class Own:
    """What a method keeps of one tensor that is exchanged together with others, but for its feedback.

    Attributes:
        slots: the current value of each slot that the method declares, flat. Never written, as :attr:`State.slots`.
        scratch: as :attr:`State.scratch`.
    """

    slots: dict[str, Array]
    scratch: dict[str, Array] = field(default_factory=dict)


@dataclass(eq=False)
class Before:
    """What a state was before its last exchange.

    Attributes:
        round: of :attr:`Rank.round`.
        slots, members, momentum, updates, foreign, step, restart: as those of the state; of members, their slots.
        arrived: the array; None where none was kept.
        stamps: what was written over in it: where, and what was there before.
    """

    round: int
    slots: dict[str, Array]
    members: list[dict[str, Array]]
    momentum: Pieces
    updates: tuple[int | None, ...]
    foreign: tuple[bool, ...]
    step: int
    restart: tuple[int, int]
    arrived: Array | None
    stamps: list[tuple[slice, Array | slice, Array]] = field(default_factory=list)


@dataclass(eq=False)
class State:
    """One bucket's state on one rank.

    Attributes:
        bucket: what is exchanged together.
        slots: the current value of each declared slot, flat. Never written: a step makes new values and swaps them in.
        members: of a bucket whose method runs on each tensor, what it keeps of each.
        spare: second buffers of the slots in ``feedback.BUFFERED``, which a step writes its new values into.
        joined: the members' gradients one after another; None for a bucket of one tensor.
        scratch: large arrays that methods use in a step, kept since fresh memory is expensive; no state.
        lengths: of all-gathers of fixed length, by ``Exchange.call``, that of all ranks' payloads in the phase.
        momentum: what the optimizer's momentum buffer contains of gradients whose momentum is cancelled; see
            ``engine/handover.py``. Empty for nothing.
        before: the same before the last exchange, in case that the optimizer does not take the step.
        arrived: the step in which each element last arrived, modulo 2^8, [size] int8; None where none is kept.
        updates: ``Momentum.updates`` of each member at the last exchange.
        foreign: of each member, whether what the last exchange gave the optimizer is not in ``momentum``: its gradient
            was averaged in a pause, or its result is used by no rank. Empty for none.
        step: exchanges done.
        triggers: how often all ranks agreed to restart the method's schedule.
        restart: (triggers acted upon, the step of the last of them).
        undo: what it was before its last exchange, until the next one begins.
    """

    bucket: Bucket
    slots: dict[str, Array]
    members: list[Own] = field(default_factory=list)
    spare: dict[str, Array] = field(default_factory=dict)
    joined: Array | None = None
    scratch: dict[str, Array] = field(default_factory=dict)
    lengths: dict[Hashable, int] = field(default_factory=dict)
    momentum: Pieces = ()
    before: Pieces = ()
    arrived: Array | None = None
    updates: tuple[int | None, ...] = ()
    foreign: tuple[bool, ...] = ()
    step: int = 0
    triggers: int = 0
    restart: tuple[int, int] = (0, 0)
    undo: Before | None = None

    def remember(self, round: int) -> Before:
        """Return what it is, before an exchange of a round changes it."""
        members = [own.slots for own in self.members]
        buffer = self.momentum, self.updates, self.foreign
        return Before(round, self.slots, members, *buffer, self.step, self.restart, self.arrived)

    def go_back(self) -> None:
        """Be what it was before its last exchange."""
        before, self.undo = self.undo, None
        assert before is not None
        for slot, array in self.spare.items():
            if before.slots.get(slot) is array:  # the buffers change places again
                self.spare[slot] = self.slots[slot]
        self.slots = before.slots
        self.momentum, self.before = before.momentum, ()
        self.updates, self.foreign = before.updates, before.foreign
        for own, slots in zip(self.members, before.members, strict=True):
            own.slots = slots
        self.step, self.restart, self.arrived = before.step, before.restart, before.arrived
        for span, where, stamps in reversed(before.stamps):
            self.arrived[span][where] = stamps  # type: ignore[index]

    def clear_scratch(self) -> None:
        """Drop the arrays that methods use in a step."""
        self.scratch.clear()
        for own in self.members:
            own.scratch.clear()

    def arrays(self) -> list[Array]:
        """Every array that it holds."""
        joined = [array for array in (self.joined, self.arrived) if array is not None]
        own = [array for one in self.members for array in (*one.slots.values(), *one.scratch.values())]
        momentum = [array for piece in (*self.momentum, *self.before) for array in slots_of(piece).values()]
        undo = [each for one in (self.undo.stamps if self.undo else ()) for each in one if not isinstance(each, slice)]
        kept = [*undo, *own, *joined, *momentum]
        return [*self.slots.values(), *self.spare.values(), *self.scratch.values(), *kept]


def slots_of(piece: Piece) -> dict[str, Array]:
    """Return the arrays of a piece of :attr:`State.momentum`, by the names that they have in a saved state."""
    if isinstance(piece, Sparse):
        return {"momentum.index": piece.index, "momentum.values": piece.values}
    if isinstance(piece, Outer):
        return {"momentum.left": piece.left, "momentum.right": piece.right}
    return {"momentum": piece}


def declared_slots(bucket: Bucket) -> dict[str, Slot]:
    """Every slot of the bucket as a whole that any stage of its program declares."""
    declared: dict[str, Slot] = {}
    for _, method in bucket.program.stages:
        if bucket.apart(method):
            declared.update({name: Slot((bucket.spec.size,)) for name in feedback.names(method)})
        else:
            declared.update(feedback.slots(method, bucket.spec))
    return declared


def declared_by_members(bucket: Bucket) -> list[dict[str, Slot]]:
    """Every slot of each tensor by itself; an empty list where there are none."""
    methods = [method for _, method in bucket.program.stages if bucket.apart(method)]
    if not methods:
        return []
    return [{k: slot for method in methods for k, slot in method.state(spec).items()} for spec in bucket.members]


def itemsize(dtype: str) -> int:
    """Bytes of an element."""
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


def describe(buckets: Iterable[Bucket]) -> str:
    """Which method each group of tensors gets, and the memory that its state takes on a rank; a line per group."""
    groups: dict[str, list[Bucket]] = {}
    for bucket in buckets:
        groups.setdefault(str(bucket.program), []).append(bucket)
    lines = []
    for text, group in sorted(groups.items(), key=lambda item: -sum(bucket.spec.size for bucket in item[1])):
        elements, tensors = sum(bucket.spec.size for bucket in group), sum(len(bucket.members) for bucket in group)
        megabytes = sum(memory(bucket) for bucket in group) / 1e6
        lines.append(
            f"{text}: {tensors} tensor{'s' * (tensors != 1)}, {elements:,} elements, {megabytes:.2f} MB of state"
        )
    return "\n".join(lines)


def memory(bucket: Bucket) -> int:
    """Bytes of a bucket's state on a rank, second buffers included."""
    declared = [*declared_slots(bucket).items(), *(pair for own in declared_by_members(bucket) for pair in own.items())]
    sizes = [(name, prod(slot.shape) * itemsize(slot.dtype)) for name, slot in declared]
    return sum(2 * size if name in feedback.BUFFERED else size for name, size in sizes)
