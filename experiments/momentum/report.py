"""Compare contenders with dense training, seed by seed.

The gap is dense minus contender for accuracy and contender minus dense for bits per byte, so a positive gap is a loss.
Its 90 % interval is that of a paired t-test over the seeds. A gap is closed if its mean and the upper end of its
interval are at most :data:`LIMITS`; a contender that diverged on any seed does not close it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.attach import DENSE
from experiments.momentum.contenders import STEPS, parse, without_rate
from experiments.report import numbers, plots, statistics, tables

LIMITS = {"%": (0.5, 0.8), "bits": (0.05, 0.08)}  #: mean and upper end, in points or bits per byte
MEASURES = {"%": "held-out accuracy (%, higher is better)", "bits": "held-out bits per byte (bits, lower is better)"}
GROUP = ["task", "steps", "ranks", "decays"]  #: columns of runs that can be compared


def summary(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a row per group and contender.

    Args:
        frame: records of ``study.run``, or ``results.load("momentum")``.

    Returns:
        Columns of :data:`GROUP`; ``contender``, ``unit``, ``seeds``, ``diverged``, ``score``, ``deviation``, ``gap``,
        ``low``, ``high``, ``closed`` (None: too few seeds to say), ``ratio`` and ``seconds`` (medians).
    """
    frame = frame.drop_duplicates([*GROUP, "contender", "seed"], keep="last")
    done = frame[frame["status"] == "done"]
    done = done.assign(loss=done["score"].where(done["unit"] != "%", -done["score"]))
    gaps = statistics.gaps(done, "loss", "contender", DENSE, [*GROUP, "seed"]).rename(columns={"mean": "gap"})
    found = frame.groupby([*GROUP, "contender"], sort=False).agg(
        unit=("unit", "first"),
        seeds=("seed", "size"),
        diverged=("status", lambda status: int((status == "diverged").sum())),
        score=("score", "mean"),
        deviation=("score", "std"),
        ratio=("ratio", "median"),
        seconds=("seconds", "median"),
    )
    found = found.reset_index().merge(gaps, how="left", on=[*GROUP, "contender"])
    return found.assign(closed=[_closed(row) for _, row in found.iterrows()])


def _closed(row: pd.Series) -> bool | None:
    mean, upper = LIMITS[row["unit"]]
    if row["diverged"]:
        return False
    return None if math.isnan(row["high"]) else bool(row["gap"] <= mean and row["high"] <= upper)


def at_best_rates(found: pd.DataFrame) -> pd.DataFrame:
    """Keep, of each contender that was run at several learning rates, the rate with the least gap.

    Args:
        found: rows of :func:`summary`. Rates at which a seed diverged do not count.

    Returns:
        Its rows, with ``contender`` without the rate, and ``rate``: the factor of the contender's own rate.
    """
    base = found["contender"].map(without_rate)
    rates = [parse(name).lr / parse(usual).lr for name, usual in zip(found["contender"], base, strict=True)]
    found = found.assign(contender=base, rate=rates)
    return found[found["diverged"] == 0].sort_values("gap").drop_duplicates([*GROUP, "contender"])


def markdown(frame: pd.DataFrame) -> str:
    """Return a Markdown table per group: a row per contender, dense first, then by gap."""
    parts = []
    for (name, steps, ranks, decays), rows in summary(frame).groupby(GROUP):
        order = rows.assign(other=rows["contender"] != DENSE).sort_values(["other", "gap", "contender"])
        unit = rows["unit"].iloc[0]
        digits = 2 if unit == "%" else 3
        formats: dict[str, Any] = dict.fromkeys(("score", "deviation"), f"{{:.{digits}f}}".format)
        formats |= dict.fromkeys(("gap", "low", "high"), f"{{:+.{digits}f}}".format)
        formats |= {"closed": {True: "yes", False: "no"}.get, "ratio": numbers.rate_of, "seconds": "{:.0f}".format}
        rate = ", with a rate that falls to 0" if decays else ""
        text = tables.markdown(order.drop(columns=[*GROUP, "unit", "pairs", "other"]), **formats)
        parts.append(f"### {name}: {steps} steps, {ranks} ranks{rate}, {MEASURES[unit]}\n\n{text}\n")
    return "\n".join(parts)


def picture(frame: pd.DataFrame) -> Figure:
    """Draw held-out scores over the steps, of a frame as in :func:`summary`: dense, and top-k by its momentum."""
    names = {DENSE: DENSE, "topk:plain": "momentum kept", "topk": "adapted", "topk:cancelled": "cancelled"}
    chosen = (frame["steps"] == STEPS) & ~frame["decays"].astype(bool) & (frame["status"] == "done")
    runs = frame[chosen & frame["contender"].isin(list(names))].explode("evaluations")
    points = runs.assign(step=runs["evaluations"].str[0], value=runs["evaluations"].str[1].astype(float))
    points["line"] = pd.Categorical(points["contender"].map(names), list(names.values()))

    def decorate(axes: Axes, rows: pd.DataFrame) -> None:
        late = rows[rows["step"] > rows["step"].max() / 5]["value"]  # the first steps would hide later differences
        margin = 0.15 * np.ptp(late) or 1.0
        axes.set(ylim=(late.min() - margin, late.max() + margin))
        axes.set_ylabel("accuracy, %" if rows["unit"].iloc[0] == "%" else "bits per byte")

    return plots.lines(
        points.sort_values(["task", "line"]), "step", "value", by="line", panel="task", decorate=decorate
    )
