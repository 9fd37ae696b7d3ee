"""Bring the model into line with two steps that were measured over the link: a dense one, and a compressed one.

Collectives that are timed alone find all ranks awake and waiting; in a step they do not. The larger part of the link's
time, bytes or what is not spent on bytes, is scaled so that the predicted dense step is the measured one. What is then
missing of the compressed step is shared out among its gradients: the driver's own work, and waiting for its rounds.
"""

from __future__ import annotations

from dataclasses import replace

from experiments.advise.choose import Case, bisected
from experiments.advise.timeline import Link
from hvdcompress.plan import load

__all__ = ["FARTHEST", "REFERENCE", "calibrate", "handling"]

FARTHEST = 4.0  #: times more or less than measured alone: what is farther off has another cause
REFERENCE = {"method": "scalecom", "density": 0.0167}  #: the plan whose step is measured
LEAST_HANDLING, MOST_HANDLING = 1e-9, 5e-3  #: seconds for each gradient: more has another cause


def calibrate(case: Case, seconds: float) -> Link:
    """The case's link, scaled.

    Args:
        case: the training over the link as it was measured.
        seconds: of a dense step, measured.
    """
    link, dense = case.given, case.predict(case.dense)
    if not dense.link:
        return link
    slow = dense.latency > dense.link / 2

    def scaled(factor: float) -> Link:
        if slow:
            return replace(link, round=link.round * factor, message=link.message * factor)
        return replace(link, rate=link.rate / factor)

    def short(factor: float) -> bool:
        return case.over(scaled(factor)).predict(case.dense).seconds < seconds

    return scaled(bisected(short, 1 / FARTHEST, FARTHEST))


def handling(case: Case, seconds: float) -> float:
    """What a plan that is not dense adds to each gradient, in processor seconds; see :class:`Case`.

    Args:
        case: the training, whose link has been brought into line.
        seconds: of a step under :data:`REFERENCE`, measured.
    """
    plan = load(REFERENCE)

    def short(each: float) -> bool:
        return case.with_handling(each).predict(plan).seconds < seconds

    return bisected(short, LEAST_HANDLING, MOST_HANDLING)
