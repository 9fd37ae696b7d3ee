"""Phases of a training: its thirds, by which measurements are compared."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

PHASES = ("early", "middle", "late")


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
