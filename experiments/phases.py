"""Phases of a training: its thirds, by which measurements are compared, and a warning where gradients vanish."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

__all__ = ["COLLAPSE", "PHASES", "by_phase", "collapse", "phase_of"]

PHASES = ("early", "middle", "late")
#: Norms have collapsed in a phase whose median is below this share of the largest one: relative errors there are errors
#: of what is hardly a gradient any more. The phases of a healthy training differ far less.
COLLAPSE = 0.1


def phase_of(step: int, steps: int) -> str:
    """Return the third of ``steps`` that a step, counted from 0, is in.

    >>> [phase_of(step, 7) for step in range(7)]
    ['early', 'early', 'early', 'middle', 'middle', 'late', 'late']
    """
    return PHASES[min(step * len(PHASES) // steps, len(PHASES) - 1)]


def by_phase(values: Sequence[float]) -> dict[str, float]:
    """Return the median in each phase of values that were measured at regular steps; NaN is no value.

    >>> by_phase([1.0, 2.0, 2.0, 9.0, 9.0, float("nan")])
    {'early': 1.5, 'middle': 5.5, 'late': 9.0}
    """
    phases = [phase_of(step, len(values)) for step in range(len(values))]
    return pd.Series(values, dtype=float).groupby(phases).median().reindex(PHASES).to_dict()


def collapse(norms: Sequence[float]) -> str | None:
    """Return a warning if the norms collapse in a phase (:data:`COLLAPSE`), or None.

    Args:
        norms: ‖ḡ‖ at regular steps of a training.
    """
    medians = by_phase(norms)
    low = [name for name, median in medians.items() if median < COLLAPSE * max(medians.values())]
    if not low:
        return None
    listed = ", ".join(f"{name} {median:.3g}" for name, median in medians.items())
    return (
        f"the norm of the mean gradient collapses (median: {listed}; a collapse is below {COLLAPSE:.0%} of the "
        f"largest): relative errors of the {' and '.join(low)} phase are of what is hardly a gradient any more"
    )
