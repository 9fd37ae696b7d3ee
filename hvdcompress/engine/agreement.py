"""What ranks must agree on before they exchange anything, and the error that all of them raise where they do not."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["PeerError", "Status", "compare_plans", "failure", "fingerprint"]


class PeerError(RuntimeError):
    """A rank failed, or ranks do not agree; every rank raises this."""


def compare_plans(everyone: Sequence[tuple[dict[str, Any], dict[str, str]]]) -> None:
    """Make sure that all ranks have the same plan and the same tensors.

    ``everyone``: of each rank its plan as a dict, and what it says of each tensor, by name.

    Raises:
        PeerError: they differ; it names the first key that does, and the rank. The same on every rank.
    """
    first_plan, first_tensors = everyone[0]
    for rank, (other_plan, other_tensors) in enumerate(everyone[1:], 1):
        for what, a, b in (("plan key", first_plan, other_plan), ("tensor", first_tensors, other_tensors)):
            for key in sorted(a.keys() | b.keys(), key=lambda key: (key != "method", key)):
                if a.get(key) != b.get(key):
                    raise PeerError(
                        f"ranks disagree: {what} {key!r} is {a.get(key)!r} on rank 0 and {b.get(key)!r} on rank "
                        f"{rank}; give every rank the same plan and the same model"
                    )


def fingerprint(*facts: Any) -> float:
    """A hash of what ranks must have alike: 52 bits, so that a float64 and its negative hold it exactly."""
    return float(int.from_bytes(hashlib.sha256(repr(facts).encode()).digest()[:8], "little") >> 12)


def failure(texts: Sequence[str]) -> PeerError:
    """The error that every rank raises when some have failed; ``texts``: what each says, empty where all is well."""
    message = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)
    return PeerError(f"a gradient exchange failed, so every rank stops. {message}")


@dataclass(frozen=True)
class Status:
    """What a rank says of a step, in seven numbers whose *maxima* over ranks all ranks then read.

    A maximum of (f, −f) shows any difference in f, where an average could hide one.
    """

    failed: bool = False
    non_finite: bool = False
    triggered: bool = False
    state: float = 0.0  #: :func:`fingerprint` of what must be alike
    loss_scale: float = 1.0
    alike: bool = True  #: the ranks have one ``state``
    least_loss_scale: float = 1.0  #: over ranks; ``loss_scale`` is the greatest

    def numbers(self) -> list[float]:
        """The seven numbers, to be all-reduced by their maximum."""
        flags = map(float, (self.failed, self.non_finite, self.triggered))
        return [*flags, self.state, -self.state, self.loss_scale, -self.loss_scale]

    @classmethod
    def of(cls, maxima: Sequence[float]) -> Status:
        """What all ranks together say."""
        failed, non_finite, triggered, high, low, scale, negative = maxima
        return cls(bool(failed), bool(non_finite), bool(triggered), high, scale, high == -low, -negative)

    def check_loss_scale(self) -> None:
        """Raises PeerError if the ranks' loss scales differ."""
        if self.loss_scale != self.least_loss_scale:
            scales = f"it is {self.least_loss_scale} on one and {self.loss_scale} on another"
            raise PeerError(f"ranks disagree on the loss scale: {scales}")
