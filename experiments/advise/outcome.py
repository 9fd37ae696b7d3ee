"""One plan of one case of a validation: predicted and measured."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Outcome"]


@dataclass(frozen=True)
class Outcome:
    """One plan of one case: its predicted step, and the median of its measured ones, in seconds."""

    rate: str
    net: str
    label: str
    advised: str
    verdict: str
    predicted: float
    measured: float
    count: int

    @property
    def error(self) -> float:
        """(predicted − measured) ÷ measured."""
        return self.predicted / self.measured - 1
