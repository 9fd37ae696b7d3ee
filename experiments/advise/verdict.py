"""The verdict: don't compress, 16 bits, this plan, or fewer rounds; with the reason, and how sure it is."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from experiments.advise.choose import DENSE, Candidate, Case
from experiments.cluster.rates import speed
from experiments.report import numbers
from experiments.scale.model import Model
from experiments.scale.run import FITTED

__all__ = ["Advice", "advise", "error_of", "evidence"]

LITTLE = 0.05  # of a step: what is not worth a change (the threshold is ours)
HALF = ("fp16", "bf16")
DONT, SIXTEEN, PLAN, FUSE = "don't compress", "{}", "this plan", "fewer rounds (fuse)"


@dataclass(frozen=True)
class Advice:
    """What is advised, and why.

    ``alone``: seconds of a step that exchanges nothing; ``error``: of an exchange's predicted time, relative;
    ``unsure``: the verdict could be another within that error.
    """

    verdict: str
    reason: str
    best: Candidate
    dense: Candidate
    alone: float
    error: float
    unsure: bool
    candidates: list[Candidate]

    @property
    def ceiling(self) -> float:
        """How many times shorter a step over an infinitely fast link is than the dense one."""
        return self.dense.seconds / self.alone if self.alone else float("inf")

    def plan_yaml(self) -> str:
        """The plan as ``hvdcompress.load`` reads it."""
        text = yaml.safe_dump(self.best.plan.to_dict(), sort_keys=False, allow_unicode=True)
        return f"# {self.best.label}: advised by `hvdcompress advise`\n{text}"

    def interval(self, candidate: Candidate) -> tuple[float, float]:
        """Seconds of a step, less and plus the error of what its exchange adds, if that is predicted."""
        off = candidate.off(self.error)
        return candidate.seconds - off, candidate.seconds + off


def error_of(file: Path | None = None) -> float:
    """The relative error of the cost model on exchanges that its fit had not seen (a quarter of them in turn).

    Args:
        file: the fitted constants; the packaged ones without it.
    """
    model = Model.open(file or FITTED["horovod"])
    return model.held_out["a quarter, in turn"].median


def advise(case: Case, found: list[Candidate], error: float) -> Advice:
    """Give the verdict.

    Args:
        case: the training and the link.
        found: the candidates, the dense one first; those that lost a training against it are not advised.
        error: of an exchange's predicted time, relative.
    """
    dense, alone = found[0], case.times.alone
    assert dense.label == DENSE
    able = [one for one in found if not one.lost]
    best = _simplest(able, error)
    half = min((one for one in able if one.method in HALF), key=_seconds, default=None)
    exposed = dense.step.exposed / dense.step.seconds if dense.step.seconds else 0.0
    gain = _gain(best, dense) if dense.seconds else 0.0
    if half and half is not best and half.seconds <= best.seconds * (1 + LITTLE):
        others = f"; {best.label} would be {numbers.percent(gain)} shorter than dense" if gain > LITTLE else ""
        best = half
        gain = _gain(best, dense)
    else:
        others = ""
    if exposed < LITTLE:
        verdict, best = DONT, dense
        reason = f"dense exchange adds {_percent(exposed)} to a step: there is next to nothing to gain"
    elif gain <= LITTLE:
        latency = dense.step.latency / dense.step.link if dense.step.link else 0.0
        verdict = FUSE if latency > 0.5 else DONT
        nearest = min((one for one in able if one is not dense), key=_seconds, default=dense)
        reason = (
            f"the best candidate, {nearest.label}, changes the step by {_percent(-_gain(nearest, dense), sign=True)}"
        )
        if verdict == FUSE:
            reason += (
                f", and {_percent(latency)} of the link's time is not spent on bytes: send fewer and larger messages "
                "(fusion, gradient accumulation), or exchange less often"
            )
        best = dense
    elif best.seconds + best.off(error) > dense.seconds - dense.off(error):
        verdict = DONT
        reason = (
            f"{best.label} may make the step {_percent(gain)} shorter, which is less than the error of both predictions"
        )
        best = dense
    elif best.method in HALF:
        verdict = SIXTEEN.format(best.method)
        reason = f"16 bits make the step {_percent(gain)} shorter, and nothing else is much better{others}"
    else:
        verdict = PLAN
        reason = f"{best.label} makes the step {_percent(gain)} shorter below {_rate(best.break_even)}"
    lost = min((one for one in found if one.lost), key=_seconds, default=None)
    if best is dense and lost and lost.trial:
        verdict = DONT
        reason = f"{lost.label} makes the step {_percent(_gain(lost, dense))} shorter, but {lost.trial.why_lost()}"
    unsure = best is dense and any(
        one.seconds - one.off(error) < dense.seconds + dense.off(error)
        for one in able
        if one is not dense and (one.measured is None or dense.measured is None)
    )
    return Advice(verdict, reason, best, dense, alone, error, unsure, found)


def _simplest(found: list[Candidate], error: float) -> Candidate:
    """The shortest step; a plan for a part of the tensors must be shorter than any other by more than the error.

    Among many such plans the greedy search finds the one of which the model is most wrong, too.
    """
    shortest, whole = min(found, key=_seconds), min((one for one in found if not one.partly), key=_seconds)
    return shortest if whole.seconds - shortest.seconds > whole.off(error) + shortest.off(error) else whole


def _seconds(one: Candidate) -> float:
    return one.seconds


def _gain(one: Candidate, dense: Candidate) -> float:
    return 1 - one.seconds / dense.seconds


def _percent(share: float, sign: bool = False) -> str:
    return f"{100 * share:+.1f} %" if sign else f"{100 * share:.1f} %"


def _rate(bits: float) -> str:
    return "any speed" if bits == float("inf") else speed(bits)


def evidence(method: str) -> list[dict[str, Any]]:
    """What the project's own trainings say of a method's accuracy (``docs/results.md``); empty if nothing."""
    file = Path(__file__).with_name("evidence.json")
    return [row for row in json.loads(file.read_text(encoding="utf-8"))["rows"] if row["method"] == method]
