"""Silent differences: checksums of what all ranks must have alike, every ``verify_every`` steps.

A rank's checksums go into the fingerprint that its status has in any case (``agreement.py``), so that comparing them
costs no collective; only where some differ are they gathered, and the error names the first. What is compared: the
parameters, where a driver has them, and the shared slots of state, such as PowerSGD's factor and GradiVeQ's basis. The
steps that tensors have done are compared in every step.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hvdcompress.engine.agreement import PeerError
from hvdcompress.engine.bucket_state import BucketState, declared_by_members, declared_slots
from hvdcompress.method import Array

Host = Callable[[Array], "np.ndarray[Any, Any]"]  #: an array, as one of numpy's in the host's memory


def checksum(array: np.ndarray[Any, Any]) -> int:
    """The CRC-32 of an array's bytes, as it would lie contiguously: alike only for arrays that are equal to the bit."""
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def shared_slots(states: Iterable[BucketState], host: Host) -> dict[str, int]:
    """The checksums of what methods keep alike on all ranks, by what it is, in words."""
    return {what: checksum(host(array)) for what, array in _shared(states)}


def _shared(states: Iterable[BucketState]) -> Iterator[tuple[str, Array]]:
    for state in states:
        bucket = state.bucket
        places = [(bucket.spec.name, declared_slots(bucket), state.slots)]
        for member, declared, own in zip(bucket.members, declared_by_members(bucket), state.members, strict=False):
            places.append((member.name, declared, own))
        for name, declared, slots in places:
            for slot, described in declared.items():
                if described.scope == "shared" and slot in slots:
                    yield f"the state {slot!r} of tensor {name!r}", slots[slot]


def compare(everyone: Sequence[Mapping[str, int]], step: int) -> None:
    """Make sure that all ranks have the same checksums.

    Args:
        everyone: every rank's, in rank order, each in the order in which differences are to be named; empty where a
            rank has made none.
        step: the steps that were done, for the message.

    Raises:
        PeerError: they differ; it names the first that does, the ranks that have each value, and how many differ.
    """
    known = [(rank, sums) for rank, sums in enumerate(everyone) if sums]
    keys = dict.fromkeys(key for _, sums in known for key in sums)
    different = [key for key in keys if len({sums.get(key) for _, sums in known}) > 1]
    if not different:
        return
    first = different[0]
    ranks_of: dict[int | None, list[int]] = {}
    for rank, sums in known:
        ranks_of.setdefault(sums.get(first), []).append(rank)
    values = "; ".join(
        f"{'missing' if value is None else f'{value:08x}'} on rank {', '.join(map(str, ranks))}"
        for value, ranks in ranks_of.items()
    )
    raise PeerError(
        f"ranks differ: {first} is not the same on all ranks after {step} steps (checksums: {values}); "
        f"{len(different)} of {len(keys)} that were compared differ. Start all ranks from the same parameters, load "
        "every rank's own state, and change parameters alike on all ranks. `verify_every` in the plan has found it"
    )
