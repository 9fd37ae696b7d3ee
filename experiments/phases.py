"""Phases of a training: its thirds, by which measurements are compared."""

from __future__ import annotations

PHASES = ("early", "middle", "late")


def phase_of(step: int, steps: int) -> str:
    """Return the third of ``steps`` that a step, counted from 0, is in.

    >>> [phase_of(step, 7) for step in range(7)]
    ['early', 'early', 'early', 'middle', 'middle', 'late', 'late']
    """
    return PHASES[min(step * len(PHASES) // steps, len(PHASES) - 1)]
