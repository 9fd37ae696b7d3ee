"""Agreement of the ranks in a step: shared configuration, status, checksums, and the errors of disagreement.

Ranks exchange one :class:`Status` per agreement, as an elementwise maximum. Only if it shows a difference do they
gather texts, to raise the same :class:`PeerError` with the same message everywhere.

Why a maximum of eight numbers: it is one small collective of a fixed length, which every network has. The maximum of a
flag tells whether any rank has set it. The maximum of (f, −f) is (f, −f) again only if all ranks have the same f; a sum
or an average can hide a difference. Plan, tensors and steps enter as one hash of 52 bits, because float64 holds it and
its negative exactly. Texts have different lengths and need two collectives, so they wait for an error.

What is not nice: a rank that called Horovod's ``join()`` contributes zeros without knowing of this status, and shows
only because no loss scale is zero. A hash tells that something differs, not what: the ranks gather their plans then.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from hvdcompress.engine.bucket_state import BucketState
from hvdcompress.method import Array


class PeerError(RuntimeError):
    """A rank failed, or the ranks disagree. Every rank raises it with the same message."""


@dataclass(frozen=True, eq=False)
class SharedConfig:
    """The plan and the tensors, which must be equal on all ranks.

    Attributes:
        plan: the plan as a dict, plus further settings that must be equal, such as the op.
        tensors: {tensor name: shape and dtype as text}.
    """

    plan: Mapping[str, Any]
    tensors: Mapping[str, str]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the plan and the tensors, in hexadecimal."""
        return hashlib.sha256(repr([sorted(self.plan.items()), sorted(self.tensors.items())]).encode()).hexdigest()


def compare_configs(everyone: Sequence[tuple[Mapping[str, Any], Mapping[str, str]]]) -> None:
    """Raise an error unless all ranks have the same plan and the same tensors.

    Args:
        everyone: for each rank, the plan and the tensors of its :class:`SharedConfig`. Both are empty if the rank
            failed before it knew them.

    Raises:
        PeerError: they differ. The message names the first differing key and two ranks.
    """
    known = [(rank, plan, tensors) for rank, (plan, tensors) in enumerate(everyone) if plan or tensors]
    for rank, plan, tensors in known[1:]:
        first, first_plan, first_tensors = known[0]
        for kind, a, b in (("plan key", first_plan, plan), ("tensor", first_tensors, tensors)):
            # "method" first: if it differs, the other hyper-parameters differ as a consequence
            for key in sorted(a.keys() | b.keys(), key=lambda key: (key != "method", key)):
                if a.get(key) != b.get(key):
                    raise PeerError(
                        f"ranks disagree: {kind} {key!r} is {a.get(key)!r} on rank {first} and {b.get(key)!r} on rank "
                        f"{rank}; give every rank the same plan and the same model"
                    )


def fingerprint(*facts: Any) -> float:
    """Return a 52-bit hash of any values, as a float64: the hash and its negative are exact."""
    return float(int.from_bytes(hashlib.sha256(repr(facts).encode()).digest()[:8], "little") >> 12)


def text_of(error: BaseException | None) -> str:
    """Return what other ranks are told of an error: its message or its class, and an empty string for None."""
    return "" if error is None else str(error) or type(error).__name__


def peer_error(texts: Sequence[str]) -> PeerError:
    """Return the error that every rank raises after a failure.

    Args:
        texts: the error message of each rank, in rank order; an empty string for ranks without an error.
    """
    message = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)
    return PeerError(f"a gradient exchange failed, so every rank stops. {message}")


JOIN_MESSAGE = (
    "hvd.join() is not supported with compression, because a joined rank contributes zeros: run the same number of "
    "steps on every rank"
)


class Status(NamedTuple):
    """State of a step: eight numbers, flags among them, of which the ranks take the maxima.

    A number f on which ranks must agree is accompanied by −f: the maximum of (f, −f) is (f, −f) again only if all ranks
    have the same f; an average could hide a difference.

    Attributes:
        failed: whether this rank has an error; in a reduced status, whether any rank has one.
        non_finite: whether a gradient has an Inf or a NaN; reduced: on any rank.
        triggered: whether this rank requests a restart of the phases; reduced: any rank.
        replaced: whether a state was loaded, released or regrouped, so that known payload lengths may differ between
            ranks; reduced: on any rank.
        state: :func:`fingerprint` of the values that must be equal on all ranks.
        minus_state: −state.
        loss_scale: this rank's loss scale; reduced: the greatest.
        minus_loss_scale: −loss_scale; reduced: minus the smallest.
    """

    failed: float
    non_finite: float
    triggered: float
    replaced: float
    state: float
    minus_state: float
    loss_scale: float
    minus_loss_scale: float

    @property
    def alike(self) -> bool:
        """Whether ``state`` is equal on all ranks."""
        return self.state == -self.minus_state

    def require_agreement(self) -> None:
        """Check a reduced status, after the configurations were compared and are equal.

        Raises:
            PeerError: steps or loss scales differ.
        """
        if not self.alike:
            raise PeerError("ranks disagree on the step number; load the state of the same step on every rank")
        if self.loss_scale != -self.minus_loss_scale:
            scales = f"it is {-self.minus_loss_scale} on one and {self.loss_scale} on another"
            raise PeerError(f"ranks disagree on the loss scale: {scales}; update it on all ranks in the same step")


# -- detection of silent divergence, every ``verify_every`` steps -------------------------------------------------

# The checksums of a rank enter the fingerprint in its status, so comparing them needs no additional collective. Only if
# they differ are they gathered, and the error names the first difference. Compared are the parameters, if the driver
# has any, and the shared slots of methods, such as PowerSGD's factor and GradiVeQ's basis.

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
    return {
        f"the state {slot!r} of tensor {name!r}": checksum(host(slots[slot]))
        for state in states
        for name, declared, slots in state.tables()
        for slot, about in declared.items()
        if about.scope == "shared" and slot in slots
    }


def compare_checksums(everyone: Sequence[Mapping[str, int]], step: int, local_size: int = 1) -> None:
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
        compare_checksums([{key: value for key, value in sums.items() if key in common} for sums in everyone], step)
        for local_rank in range(local_size):
            compare_checksums(
                [sums if rank % local_size == local_rank else {} for rank, sums in enumerate(everyone)], step
            )
        return
    known = [(rank, sums) for rank, sums in enumerate(everyone) if sums]
    keys = dict.fromkeys(key for _, sums in known for key in sums)
    different = [key for key in keys if len({sums.get(key) for _, sums in known}) > 1]
    if not different:
        return
    first = different[0]
    values = "; ".join(
        f"{'missing' if value is None else f'{value:08x}'} on rank "
        f"{', '.join(str(rank) for rank, sums in known if sums.get(first) == value)}"
        for value in dict.fromkeys(sums.get(first) for _, sums in known)
    )
    raise PeerError(
        f"ranks differ: {first} is not equal on all ranks after {step} steps (checksums: {values}); {len(different)} "
        f"of {len(keys)} compared arrays differ. Start all ranks from the same parameters, load each rank's own state, "
        "and change parameters equally on all ranks. This check is `verify_every` in the plan"
    )
