"""Bring the model of a link into line with dense steps that were measured over it.

Collectives that are timed alone find all ranks awake and waiting; in a step they do not. The larger part of the link's
time, bytes or what is not spent on bytes, is scaled so that the predicted dense step is the measured one.
"""

from __future__ import annotations

from dataclasses import replace

from hvdcompress.lab.advise.choose import Case
from hvdcompress.lab.advise.timeline import Link

__all__ = ["FARTHEST", "calibrate"]

FARTHEST = 4.0  #: times more or less than measured alone: what is farther off has another cause


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

    low, high = 1 / FARTHEST, FARTHEST
    for _ in range(30):
        middle = (low * high) ** 0.5
        if case.over(scaled(middle)).predict(case.dense).seconds < seconds:
            low = middle
        else:
            high = middle
    return scaled((low * high) ** 0.5)
