"""Paired differences between contenders with 90 % intervals over seeds, and errors of vectors."""

from __future__ import annotations

import numpy as np
import pandas as pd

from hvdcompress.cli.numbers import mean_interval


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """Return ‖found − expected‖/‖expected‖; NaN if ``expected`` is zero."""
    norm = np.linalg.norm(expected)
    return float(np.linalg.norm(found - expected) / norm) if norm else np.nan


def gaps(frame: pd.DataFrame, value: str, by: str, reference: str, paired: list[str]) -> pd.DataFrame:
    """Return paired differences to a reference contender, with intervals.

    Args:
        frame: one row per run.
        value: the column that is compared.
        by: the column of contenders.
        reference: the contender that the others are compared with.
        paired: columns that make a pair, such as ``["task", "seed"]``; all but the last, which is averaged over, stay.

    Returns:
        Columns ``paired[:-1]``, ``by``, ``mean``, ``low``, ``high``, ``pairs``.
    """
    base = frame[frame[by] == reference].set_index(paired)[value].rename("_reference")
    joined = frame[frame[by] != reference].join(base, on=paired)
    joined["_gap"] = joined[value] - joined["_reference"]
    rows = []
    for keys, group in joined.dropna(subset=["_gap"]).groupby([*paired[:-1], by], sort=False):
        names = dict(zip([*paired[:-1], by], keys, strict=True))
        rows.append({**names, **mean_interval(group["_gap"].tolist())._asdict(), "pairs": len(group)})
    return pd.DataFrame(rows)
