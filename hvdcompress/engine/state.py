"""What a bucket's state is made of: its slots, where its members lie in them, and how much memory they take."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from hvdcompress.method import Array, Slot
from hvdcompress.parts import feedback
from hvdcompress.plan import Bucket


def describe(buckets: Iterable[Bucket]) -> str:
    """Which method each group of tensors gets, and the memory that its state takes on a rank, in lines."""
    groups: dict[str, list[Bucket]] = {}
    for bucket in buckets:
        groups.setdefault(str(bucket.program), []).append(bucket)
    lines = []
    for text, group in sorted(groups.items(), key=lambda item: -sum(u.spec.size for u in item[1])):
        elements, tensors = sum(bucket.spec.size for bucket in group), sum(len(bucket.members) for bucket in group)
        memory = 0
        for bucket in group:
            for name, slot in declared_slots(bucket).items():
                size = int(np.prod(slot.shape)) * itemsize(slot.dtype)
                memory += 2 * size if name in feedback.BUFFERED else size  # a second buffer takes the next one
        lines.append(f"{text}: {tensors} tensors, {elements:,} elements, {memory / 1e6:.2f} MB of state")
    return "\n".join(lines)


def declared_slots(bucket: Bucket) -> dict[str, Slot]:
    """Every slot that any stage of the bucket's program declares."""
    declared: dict[str, Slot] = {}
    for _, method in bucket.program.stages:
        declared.update(feedback.slots(method, bucket.spec))
    return declared


def copied(array: Array) -> Array:
    """A fresh copy: of a torch tensor a tensor, of anything else a numpy array."""
    return array.clone() if hasattr(array, "clone") else np.array(array)


def num_bytes(array: Array) -> int:
    """The memory of an array; TensorFlow's know it by the element only."""
    return array.nbytes if hasattr(array, "nbytes") else len(array) * array.dtype.size


def itemsize(dtype: str) -> int:
    """Bytes an element."""
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


def spans(bucket: Bucket) -> list[tuple[int, int]]:
    """(start, stop) of each member in the bucket's joined vector."""
    stops = np.cumsum([member.size for member in bucket.members]).tolist()
    return [(stop - member.size, stop) for stop, member in zip(stops, bucket.members, strict=True)]
