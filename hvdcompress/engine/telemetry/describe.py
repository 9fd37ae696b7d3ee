"""Text descriptions of a plan in use: which methods tensors have, and the memory of their state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import prod

from hvdcompress.engine.bucket_state import declared_by_members, declared_slots, itemsize
from hvdcompress.engine.telemetry.summary import with_prefix
from hvdcompress.parts import feedback
from hvdcompress.plan import Bucket


def describe(buckets: Iterable[Bucket]) -> str:
    """Return one line per group of tensors: the methods, the number of tensors, and the memory of state per rank."""
    groups: dict[str, list[Bucket]] = {}
    for bucket in buckets:
        groups.setdefault(str(bucket.program), []).append(bucket)
    lines = []
    for text, group in sorted(groups.items(), key=lambda item: -sum(bucket.spec.size for bucket in item[1])):
        elements = sum(bucket.spec.size for bucket in group)
        tensors = sum(len(bucket.members) for bucket in group)
        megabytes = sum(memory(bucket) for bucket in group) / 1e6
        lines.append(
            f"{text}: {tensors} tensor{'s' * (tensors != 1)}, {elements:,} elements, {megabytes:.2f} MB of state"
        )
    return "\n".join(lines)


def first_step(buckets: Sequence[Bucket], dense: int, sent: int) -> str:
    """Return a line about the first step: which tensors are compressed, and the bytes before and after.

    Args:
        buckets: all buckets.
        dense: bytes of the gradients of a step.
        sent: bytes that a rank has sent in the step.

    Returns:
        The line; empty if no tensor is compressed.
    """
    counts: Counter[str] = Counter()
    for bucket in buckets:
        if bucket.program.main.id != "none":
            counts[str(bucket.program)] += len(bucket.members)
    tensors = sum(len(bucket.members) for bucket in buckets)
    what = ", ".join(f"{program} on {count}" for program, count in counts.most_common())
    return (
        f"{what} of {tensors} tensors, {with_prefix(dense)}B → {with_prefix(sent)}B in the first step" if what else ""
    )


def memory(bucket: Bucket) -> int:
    """Return the bytes of a bucket's state on one rank, including second buffers."""
    declared = [*declared_slots(bucket).items(), *(pair for own in declared_by_members(bucket) for pair in own.items())]
    sizes = [(name, prod(slot.shape) * itemsize(slot.dtype)) for name, slot in declared]
    return sum(2 * size if name in feedback.BUFFERED else size for name, size in sizes)
