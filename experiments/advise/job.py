"""What ranks are asked to measure, and what they found, as plain data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from experiments.advise.profile import Profile
from experiments.advise.workload import Named

__all__ = ["Found", "Job"]


@dataclass(frozen=True)
class Job:
    """What ranks shall measure.

    ``error``: of an exchange's predicted time, relative; ``check``: which steps are measured, "no", "plan" (dense
    ones, and those of the advised plan) or "all" (every method's, too), in so many ``rounds`` of so many
    ``seconds`` each; ``training``: seconds of each training whose losses are compared, 0 if they are not, with so many
    ``seeds``.
    """

    workloads: Sequence[Named]
    entries: Sequence[Mapping[str, Any]]
    error: float
    check: str = "no"
    rounds: int = 2
    seconds: float = 1.0
    codecs: Mapping[str, Any] = field(default_factory=dict)
    training: float = 0.0
    seeds: int = 1

    def save(self, file: Path) -> None:
        """Write it as JSON."""
        file.write_text(json.dumps({**asdict(self), "workloads": [asdict(one) for one in self.workloads]}) + "\n")

    @classmethod
    def open(cls, file: Path) -> Job:
        """Read what :meth:`save` wrote."""
        given = json.loads(file.read_text(encoding="utf-8"))
        return cls(**{**given, "workloads": [Named(**one) for one in given["workloads"]]})


@dataclass(frozen=True)
class Found:
    """One case's profile; measured steps' seconds and plans by label, if there was a check, and what was advised.

    ``untrained``: why losses of trainings were not compared, if they should have been.
    """

    profile: Profile
    measured: Mapping[str, list[float]]
    plans: Mapping[str, Mapping[str, Any]]
    advised: str
    verdict: str
    untrained: str = ""

    def to_dict(self) -> dict[str, Any]:
        """For a line of JSON."""
        return {**vars(self), "profile": self.profile.to_dict()}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Found:
        """Read what :meth:`to_dict` made."""
        return cls(**{**given, "profile": Profile.open(given["profile"])})
