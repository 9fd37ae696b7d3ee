"""Compare the losses of dense and compressed trainings after the same seconds. ``training.py`` runs the trainings."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from experiments.configfile import Real
from experiments.output.paired import CONFIDENCE, Gap, gap_of
from experiments.report import numbers

__all__ = ["Curve", "Run", "Trial", "learns"]

TAIL = 5  # a training's loss is the mean over the last fifth of its steps
SURE = 3.0  # standard errors by which dense training's loss has to fall
LOSS, HELD_OUT = "loss", "held-out loss"
SPREAD = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)  # standard errors


@dataclass(frozen=True)
class Curve:
    """One training.

    Attributes:
        seconds: since its start, at the end of each step.
        losses: of each step, the mean over ranks.
        held_out: the mean loss of held-out examples at the end; None if there are none.
    """

    seconds: Sequence[float]
    losses: Sequence[float]
    held_out: float | None = None

    def fifth(self, number: int) -> Sequence[float]:
        """Return the losses of a fifth of the steps, from 0; at least one loss."""
        count = len(self.losses)
        start = min(number * count // TAIL, max(0, count - 1))
        return self.losses[start : max(start + 1, (number + 1) * count // TAIL)]

    def reached(self, loss: float) -> float | None:
        """Return the seconds after which the mean over a fifth of the steps was this loss or less; None if never."""
        window = len(self.fifth(TAIL - 1))
        for end in range(window, len(self.losses) + 1):
            if statistics.fmean(self.losses[end - window : end]) <= loss:
                return self.seconds[end - 1]
        return None


class Run(BaseModel):
    """What is kept of one training.

    Attributes:
        steps: how many it took in its seconds.
        loss: at the end; None if it became NaN or Inf.
        error: standard error of ``loss``.
        held_out: loss of held-out examples at the end; None if there are none, or the training diverged.
        reached: seconds after which dense training's last loss was reached, with the same seed; None if never.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    steps: int = Field(ge=1)
    loss: Real | None = Field(default=None, allow_inf_nan=False)
    error: Real = Field(default=0.0, ge=0, allow_inf_nan=False)
    held_out: Real | None = Field(default=None, allow_inf_nan=False)
    reached: Real | None = Field(default=None, ge=0, allow_inf_nan=False)

    @classmethod
    def of(cls, curve: Curve, dense: Curve) -> Run:
        """Return what is kept of a training; ``dense`` has the same seed."""
        if not _finite(curve):
            return cls(steps=len(curve.losses))
        tail = curve.fifth(TAIL - 1)
        return cls(
            steps=len(curve.losses),
            loss=statistics.fmean(tail),
            error=_error(tail),
            held_out=curve.held_out,
            reached=curve.reached(statistics.fmean(dense.fifth(TAIL - 1))) if _finite(dense) else None,
        )


class Trial(BaseModel):
    """Dense training and a plan, from the same weights and with the same batches for the same seconds.

    Attributes:
        plan: as ``load`` reads it.
        seconds: of each training.
        learns: whether the loss of dense training fell by more than it varies.
        dense: dense trainings, one for each seed.
        runs: trainings under the plan, with the same seeds.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    plan: dict[str, Any]
    seconds: Real = Field(gt=0, allow_inf_nan=False)
    learns: bool
    dense: list[Run] = Field(min_length=1)
    runs: list[Run] = Field(min_length=1)

    @classmethod
    def of(cls, plan: dict[str, Any], seconds: float, dense: Sequence[Curve], curves: Sequence[Curve]) -> Trial:
        """Return the comparison of trainings that are paired by their seeds."""
        pairs = list(zip(curves, dense, strict=True))
        return cls(
            plan=plan,
            seconds=seconds,
            learns=learns(dense),
            dense=[Run.of(one, one) for one in dense],
            runs=[Run.of(curve, one) for curve, one in pairs],
        )

    @property
    def gap(self) -> Gap:
        """The plan's loss minus dense training's, where both are finite; positive is worse."""
        return gap_of([run.loss - dense.loss for run, dense in self._pairs if None not in (run.loss, dense.loss)])  # type: ignore[operator]

    @property
    def held_out_gap(self) -> Gap:
        """The same for held-out examples; NaN if there are none."""
        pairs = [(run.held_out, dense.held_out) for run, dense in self._pairs]
        return gap_of([run - dense for run, dense in pairs if run is not None and dense is not None])

    @property
    def diverged(self) -> bool:
        """Whether the plan's loss became NaN or Inf where dense training's did not."""
        return any(run.loss is None and dense.loss is not None for run, dense in self._pairs)

    @property
    def worse_in(self) -> str | None:
        """Which loss is worse than dense training's beyond the spread, over all seeds or within each; None if none."""
        each = [
            run.loss is not None
            and dense.loss is not None
            and run.loss - dense.loss > SPREAD * math.hypot(run.error, dense.error)
            for run, dense in self._pairs
        ]
        if all(each) or self.gap.low > 0:
            return LOSS
        return HELD_OUT if self.held_out_gap.low > 0 else None

    @property
    def lost(self) -> bool:
        """Whether the plan must not be advised."""
        return self.diverged or self.worse_in is not None

    def why_lost(self) -> str:
        """Return the reason, as a part of a sentence about the plan."""
        if self.diverged:
            return "its loss became NaN or Inf"
        worse = f"its {self.worse_in} after the same {self.seconds:g} s is worse than dense's"
        key = "held_out" if self.worse_in == HELD_OUT else "loss"
        return f"{worse} ({_mean(self.runs, key)} against {_mean(self.dense, key)})"

    def notes(self, label: str) -> list[str]:
        """Return the losses and steps, and what follows from them: a sentence each."""
        count = len(self.runs)
        seeds = f", means over {count} seeds" if count > 1 else ""
        found = (
            f"Losses after {self.seconds:g} s of training{seeds}: {label} {_mean(self.runs)} "
            f"({_steps(self.runs)}), dense {_mean(self.dense)} ({_steps(self.dense)})"
        )
        if not math.isnan(self.held_out_gap.mean):
            found += f"; held out {_mean(self.runs, 'held_out')} and {_mean(self.dense, 'held_out')}"
        return [f"{found}.", self._conclusion(label)]

    def _conclusion(self, label: str) -> str:
        if self.lost:
            gap = self.held_out_gap if self.worse_in == HELD_OUT else self.gap
            return f"{label} is not advised: {self.why_lost()}{'' if self.diverged else _by(gap)}."
        if any(run.loss is None for run in self.dense):
            return "Dense training diverged, so its losses say nothing: give an --optimizer with a smaller rate."
        if not self.learns:
            return (
                "Dense training's own loss hardly fell, so these losses say nothing: give batches that can be learned "
                "(--data; random numbers cannot), or more --seconds."
            )
        reached = [min(run.reached, self.seconds) for run in self.runs if run.reached is not None]
        if len(reached) == len(self.runs) and self.gap.mean <= 0:
            return (
                f"{label} reached dense's loss after {numbers.number(statistics.fmean(reached))} of {self.seconds:g} s."
            )
        return f"The losses differ by less than their spread{_by(self.gap)}: more --seeds or --seconds tell more."

    @property
    def _pairs(self) -> list[tuple[Run, Run]]:
        return list(zip(self.runs, self.dense, strict=True))


def learns(dense: Sequence[Curve]) -> bool:
    """Return whether the loss still fell after the second fifth of the trainings, by more than it varies."""
    if not all(map(_finite, dense)):
        return False
    early, late = ([loss for curve in dense for loss in curve.fifth(number)] for number in (1, TAIL - 1))
    return statistics.fmean(early) - statistics.fmean(late) > SURE * math.hypot(_error(early), _error(late))


def _finite(curve: Curve) -> bool:
    return all(map(math.isfinite, curve.losses))


def _error(losses: Sequence[float]) -> float:
    """Return the standard error of the mean; 0 for a single loss."""
    return statistics.stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 else 0.0


def _mean(runs: Sequence[Run], what: str = "loss") -> str:
    found = [getattr(run, what) for run in runs]
    return "NaN" if None in found else numbers.number(statistics.fmean(found))


def _steps(runs: Sequence[Run]) -> str:
    return f"{statistics.fmean(run.steps for run in runs):.0f} steps"


def _by(gap: Gap) -> str:
    mean, low, high = (numbers.number(each) for each in gap)
    return f", by {mean}" + ("" if math.isnan(gap.low) else f" ({100 * CONFIDENCE:.0f} % interval {low} to {high})")
