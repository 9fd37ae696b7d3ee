"""Detection of silent divergence: checksums of state that must be equal on all ranks, every ``verify_every`` steps.

The checksums of a rank enter the fingerprint in its status (``agreement.py``), so comparing them needs no additional
collective. Only if they differ are they gathered, and the error names the first difference. Compared are the
parameters, if the driver has any, and the shared slots of methods, such as PowerSGD's factor and GradiVeQ's basis. Step
counts are compared in every step.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hvdcompress.engine.agreement import PeerError
from hvdcompress.engine.bucket_state import BucketState, declared_by_members, declared_slots
from hvdcompress.method import Array

Host = Callable[[Array], "np.ndarray[Any, Any]"]  #: converts an array to a NumPy array in host memory


def checksum(array: np.ndarray[Any, Any]) -> int:
    """Return the CRC-32 of an array's bytes in C order. It is equal for bit-identical arrays."""
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def shared_slots(states: Iterable[BucketState], host: Host = np.asarray) -> dict[str, int]:
    """Return {description: checksum} of the slots that methods declare as shared.

    Args:
        states: the bucket states of this rank.
        host: converts an array to a NumPy array in host memory.
    """
    sums = {}
    for state in states:
        bucket = state.bucket
        slot_tables = [(bucket.spec.name, declared_slots(bucket), state.slots)]
        for member, declared, own in zip(bucket.members, declared_by_members(bucket), state.members, strict=False):
            slot_tables.append((member.name, declared, own))
        for name, declared, slots in slot_tables:
            for slot, described in declared.items():
                if described.scope == "shared" and slot in slots:
                    sums[f"the state {slot!r} of tensor {name!r}"] = checksum(host(slots[slot]))
    return sums


def compare(everyone: Sequence[Mapping[str, int]], step: int, local_size: int = 1) -> None:
    """Raise an error unless all ranks have the same checksums.

    Args:
        everyone: {description: checksum} of each rank, in rank order. The message names the first difference in this
            order. Empty for a rank that has computed none.
        step: number of steps done, for the message.
        local_size: with two levels, the number of ranks per node. Ranks of a node have the state of different tensors:
            only what all ranks have is compared inside a node, and everything between nodes.

    Raises:
        PeerError: checksums differ. The message names the first difference, the ranks of each value, and the number of
            differences.
    """
    if local_size > 1:
        common = set.intersection(*map(set, everyone))
        compare([{key: value for key, value in sums.items() if key in common} for sums in everyone], step)
        for local_rank in range(local_size):
            compare([sums if rank % local_size == local_rank else {} for rank, sums in enumerate(everyone)], step)
        return
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
        f"ranks differ: {first} is not equal on all ranks after {step} steps (checksums: {values}); {len(different)} "
        f"of {len(keys)} compared arrays differ. Start all ranks from the same parameters, load each rank's own state, "
        "and change parameters equally on all ranks. This check is `verify_every` in the plan"
    )
