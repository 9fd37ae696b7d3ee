"""What ranks must agree on in a step, and the error that all of them raise where they do not."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isclose
from typing import Any


class PeerError(RuntimeError):
    """A rank failed, or ranks do not agree; every rank raises this, with the same message."""


@dataclass(frozen=True, eq=False)
class Terms:
    """What ranks must have alike, apart from the steps they have done.

    Attributes:
        plan: the plan as a dict, and whatever else is a setting.
        tensors: shape and dtype in words, by tensor name.
    """

    plan: Mapping[str, Any]
    tensors: Mapping[str, str]

    @cached_property
    def digest(self) -> str:
        """A hash of both."""
        return hashlib.sha256(repr([sorted(self.plan.items()), sorted(self.tensors.items())]).encode()).hexdigest()

    def fingerprint(self, steps: Sequence[tuple[str, int]], checksums: Mapping[str, int]) -> float:
        """A hash of both, of the steps done by each tensor, and of checksums, if there are any; for :class:`Status`."""
        return fingerprint(self.digest, steps, sorted(checksums.items()))


def compare_terms(everyone: Sequence[tuple[Mapping[str, Any], Mapping[str, str]]]) -> None:
    """Make sure that all ranks have the same plan and the same tensors.

    Args:
        everyone: of each rank, :class:`Terms`' plan and tensors; both empty where the rank had an error before it
            knew them.

    Raises:
        PeerError: they differ; it names the first key that does, and two ranks.
    """
    known = [(rank, plan, tensors) for rank, (plan, tensors) in enumerate(everyone) if plan or tensors]
    for rank, plan, tensors in known[1:]:
        first, first_plan, first_tensors = known[0]
        for what, a, b in (("plan key", first_plan, plan), ("tensor", first_tensors, tensors)):
            for key in sorted(a.keys() | b.keys(), key=lambda key: (key != "method", key)):
                if a.get(key) != b.get(key):
                    raise PeerError(
                        f"ranks disagree: {what} {key!r} is {a.get(key)!r} on rank {first} and {b.get(key)!r} on rank "
                        f"{rank}; give every rank the same plan and the same model"
                    )


def fingerprint(*facts: Any) -> float:
    """A hash of what ranks must have alike: 52 bits, so that a float64 and its negative hold it exactly."""
    return float(int.from_bytes(hashlib.sha256(repr(facts).encode()).digest()[:8], "little") >> 12)


def failure(texts: Sequence[str]) -> PeerError:
    """The error that every rank raises when some failed; ``texts``: what each rank says, empty where all is well."""
    message = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)
    return PeerError(f"a gradient exchange failed, so every rank stops. {message}")


JOIN = (
    "hvd.join() does not go with compression, as a rank that has joined gives zeros: take as many steps on every rank"
)


def factor_of(probe: Sequence[float], world: int) -> float:
    """What a stock all-reduce does, by what became of the ranks' probes [1/p, (rank + 1)/p²].

    Returns:
        1/p if it averages, 1 if it sums.

    Raises:
        PeerError: it does something else, or not all ranks gave theirs.
    """
    for factor in (1.0 / world, 1.0):
        second = factor * (world + 1) / (2 * world)
        if isclose(probe[0], factor, rel_tol=0.01) and isclose(probe[1], second, rel_tol=0.01):
            return factor
    raise PeerError(
        "gradients were neither averaged nor summed over all ranks: the optimizer's op must be hvd.Average or hvd.Sum "
        f"(Min, Max, Product and Adasum are refused); and {JOIN}"
    )


NUMBERS = 8  #: of a status


@dataclass(frozen=True)
class Status:
    """How a step stands, in eight numbers whose *maxima* over ranks all ranks then read.

    A maximum of (f, −f) shows any difference in f; an average could hide one.

    Attributes:
        failed, non_finite, triggered: flags; of all ranks together, whether any has it.
        replaced: the same: a state was loaded, released or regrouped, so ranks may not know lengths of payloads alike.
        state: :func:`fingerprint` of what must be alike.
        loss_scale: the greatest over ranks.
        alike: the ranks have one ``state``.
        least_loss_scale: over ranks.
    """

    failed: bool = False
    non_finite: bool = False
    triggered: bool = False
    replaced: bool = False
    state: float = 0.0
    loss_scale: float = 1.0
    alike: bool = True
    least_loss_scale: float | None = None

    def numbers(self) -> list[float]:
        """The eight numbers, to be all-reduced by their maximum."""
        # As maxima are taken, (f, −f) shows whether all ranks have the same f
        flags = map(float, (self.failed, self.non_finite, self.triggered, self.replaced))
        return [*flags, self.state, -self.state, self.loss_scale, -self.loss_scale]

    @classmethod
    def of(cls, maxima: Sequence[float]) -> Status:
        """What all ranks together say."""
        failed, non_finite, triggered, replaced = map(bool, maxima[:4])
        high, low, scale, negative = maxima[4:]
        return cls(failed, non_finite, triggered, replaced, high, scale, high == -low, -negative)

    @property
    def joined(self) -> bool:
        """Whether a rank gave zeros in the place of its numbers, as in Horovod's ``join()``: scales are positive."""
        return self.least_loss_scale == 0

    @property
    def agreed(self) -> bool:
        """Whether the ranks have the same terms, steps and loss scale."""
        return self.alike and self.least_loss_scale in (None, self.loss_scale)

    def explain(self) -> None:
        """Raise what ranks disagree on, where their terms are alike.

        Raises:
            PeerError: always.
        """
        if self.alike:
            scales = f"it is {self.least_loss_scale} on one and {self.loss_scale} on another"
            raise PeerError(f"ranks disagree on the loss scale: {scales}")
        raise PeerError("ranks disagree on the step: load every rank's own state, of the same step")
