"""Phases of a training and spreads of what was measured in them: what tables say in the place of one step's number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

PHASES = ("early", "middle", "late")
COLLAPSE = 0.1
"""Norms have collapsed in a phase whose median is below this share of the largest phase's. Relative errors there are
of what is hardly a gradient any more: a training's step sizes differ far less between its phases."""


class Spread(NamedTuple):
    """Median and quartiles."""

    median: float
    low: float
    high: float


def phase_of(step: int, steps: int) -> str:
    """The third of ``steps`` that a step, counted from 0, is in.

    >>> [phase_of(step, 7) for step in range(7)]
    ['early', 'early', 'early', 'middle', 'middle', 'late', 'late']
    """
    return PHASES[min(step * len(PHASES) // steps, len(PHASES) - 1)]


def spread(values: Sequence[float]) -> Spread | None:
    """Median and quartiles of the numbers among the values (NaN is none); None if there are none.

    >>> spread([1.0, 2.0, math.nan, 3.0, 4.0, 5.0])
    Spread(median=3.0, low=2.0, high=4.0)
    """
    found = [value for value in values if not math.isnan(value)]
    return Spread(*map(float, np.percentile(found, (50, 25, 75)))) if found else None


def by_phase(values: Sequence[float]) -> dict[str, Spread | None]:
    """The spread in each phase of values that were measured at regular steps of a training.

    >>> {name: found and found.median for name, found in by_phase([1.0, 2.0, 2.0, 9.0, 9.0, math.nan]).items()}
    {'early': 1.5, 'middle': 5.5, 'late': 9.0}
    """
    phases = [phase_of(step, len(values)) for step in range(len(values))]
    return {name: spread([v for v, phase in zip(values, phases, strict=True) if phase == name]) for name in PHASES}


def collapse(norms: Sequence[float]) -> str | None:
    """A warning if the norms collapse in a phase (:data:`COLLAPSE`), or None.

    Args:
        norms: ‖ḡ‖ at regular steps of a training.
    """
    medians = {name: found.median for name, found in by_phase(norms).items() if found}
    largest = max(medians.values(), default=0.0)
    low = [name for name, median in medians.items() if median < COLLAPSE * largest]
    if not low:
        return None
    listed = ", ".join(f"{name} {median:.3g}" for name, median in medians.items())
    return (
        f"the norm of the mean gradient collapses (median: {listed}; a collapse is below {COLLAPSE:.0%} of the "
        f"largest): relative errors of the {' and '.join(low)} phase are of what is hardly a gradient any more"
    )
