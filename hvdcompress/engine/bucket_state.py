"""State of one bucket on one rank between steps, as an immutable value.

Nobody writes to the arrays of a :class:`BucketState`. A step writes new arrays, in second buffers that :class:`Memory`
owns, and the commit replaces the whole value. An error, a NaN or ``discard()`` therefore undoes nothing: the old value
is still intact.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from math import prod

import numpy as np

from hvdcompress.method import Array, Slot
from hvdcompress.ops.spec import Ops
from hvdcompress.parts import feedback
from hvdcompress.plan import Bucket


@dataclass(frozen=True, eq=False)
class BucketState:
    """State of one bucket on one rank.

    Attributes:
        bucket: the bucket.
        slots: {slot name: flat array} of the bucket as a whole.
        members: {slot name: flat array} for each tensor, if the method runs on each tensor; otherwise empty.
        arrived: the step in which each element was last sent, modulo 2^8, int8 [size]; None if not tracked.
        step: number of exchanges so far.
        triggers: number of triggers on which all ranks agreed.
        restart: (number of triggers that took effect, step in which the last of them did).
        flushed: whether the residual was sent completely, because compression is given up (``fallback.py``).
    """

    bucket: Bucket
    slots: dict[str, Array]
    members: tuple[dict[str, Array], ...] = ()
    arrived: Array | None = None
    step: int = 0
    triggers: int = 0
    restart: tuple[int, int] = (0, 0)
    flushed: bool = False

    @classmethod
    def zeros(cls, bucket: Bucket, like: Array, ops: Ops) -> BucketState:
        """Return the state before the first step, all zeros, on the device of ``like``."""

        def zeros(declared: Mapping[str, Slot]) -> dict[str, Array]:
            return {name: ops.zeros(prod(slot.shape), slot.dtype, like) for name, slot in declared.items()}

        return cls(bucket, zeros(declared_slots(bucket)), tuple(map(zeros, declared_by_members(bucket))))

    def tables(self) -> list[tuple[str, dict[str, Slot], dict[str, Array]]]:
        """Return name, declared slots and arrays of the bucket as a whole, and then of each tensor with own slots."""
        names = [self.bucket.spec.name, *(member.name for member in self.bucket.members)]
        declared = [declared_slots(self.bucket), *declared_by_members(self.bucket)]
        return list(zip(names, declared, [self.slots, *self.members], strict=False))


@dataclass(eq=False)
class Memory:
    """Buffers of one bucket that are reused from step to step, because allocation is slow. They are not state.

    Attributes:
        scratch: {name: array} that the method uses within a step, by the index of the tensor if it runs on each tensor;
            None for the bucket. An abandoned collective may still write to them.
        pairs: {slot: its two alternating buffers}.
        lengths: {``Exchange.collective_key``: payload bytes on all ranks} of fixed-length all-gathers in this phase.
    """

    scratch: defaultdict[int | None, dict[str, Array]] = field(default_factory=lambda: defaultdict(dict))
    lengths: dict[Hashable, int] = field(default_factory=dict)
    pairs: dict[str, tuple[Array, Array]] = field(default_factory=dict)

    def second_buffer(self, slot: str, current: Array, dtype: str, ops: Ops) -> Array:
        """Return the buffer for the new value of a slot, which is never the buffer of the current value."""
        # Compare identities instead of alternating: after discard() the current array is the one of two steps ago
        for buffer in self.pairs.get(slot, ()):
            if buffer is not current and len(buffer) == len(current):
                return buffer
        buffer = ops.zeros(len(current), dtype, like=current)
        self.pairs[slot] = (current, buffer)
        return buffer


def declared_slots(bucket: Bucket) -> dict[str, Slot]:
    """Return {name: slot} of the bucket as a whole, over all periods of its program."""
    declared: dict[str, Slot] = {}
    for _, method in bucket.program.periods:
        # The residuals of all tensors are one array even then, so that one array op can process them
        if bucket.runs_per_tensor(method):
            declared.update({name: Slot((bucket.spec.size,)) for name in feedback.slot_names(method)})
        else:
            declared.update(feedback.slots(method, bucket.spec))
    return declared


def declared_by_members(bucket: Bucket) -> list[dict[str, Slot]]:
    """Return {name: slot} of each tensor, over all periods of the program; an empty list if there are none."""
    methods = [method for _, method in bucket.program.periods if bucket.runs_per_tensor(method)]
    if not methods:
        return []
    return [{k: slot for method in methods for k, slot in method.state(spec).items()} for spec in bucket.members]


def itemsize(dtype: str) -> int:
    """Return the bytes of one element. NumPy does not know bfloat16."""
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
