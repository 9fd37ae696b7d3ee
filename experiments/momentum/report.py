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

from experiments.momentum.contenders import DENSE, STEPS, parse
from experiments.report import numbers, plots, statistics, tables

__all__ = ["LIMITS", "at_best_rates", "markdown", "overview", "picture", "summary", "table"]

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
    base = found["contender"].str.replace(r"lr=[\d.]+,?", "", regex=True).str.replace(r"[@,]+(?=:|$)", "", regex=True)
    rates = [parse(name).lr / parse(usual).lr for name, usual in zip(found["contender"], base, strict=True)]
    found = found.assign(contender=base, rate=rates)
    return found[found["diverged"] == 0].sort_values("gap").drop_duplicates([*GROUP, "contender"])


def _digits(unit: str) -> int:
    return 2 if unit == "%" else 3


def table(rows: pd.DataFrame) -> str:
    """Return the Markdown table of a group: a row per contender, dense first, then by gap."""
    digits = _digits(rows["unit"].iloc[0])

    def cells(row: pd.Series) -> dict[str, Any]:
        gap, low, high = row["gap"], row["low"], row["high"]
        spread = "" if math.isnan(row["deviation"]) else f" ± {row['deviation']:.{digits}f}"
        return {
            "contender": row["contender"],
            "seeds": f"{row['seeds']}" + (f" ({row['diverged']} diverged)" if row["diverged"] else ""),
            "score": None if math.isnan(row["score"]) else f"{row['score']:.{digits}f}{spread}",
            "gap": None if math.isnan(gap) else f"{gap:+.{digits}f}",
            "90 % interval": None if math.isnan(high) else f"{low:+.{digits}f} to {high:+.{digits}f}",
            "closed": None if row["contender"] == DENSE else {True: "yes", False: "no", None: None}[row["closed"]],
            "compression ratio": numbers.rate_of(row["ratio"]),
            "seconds per run": f"{row['seconds']:.0f}",
        }

    order = rows.assign(dense=rows["contender"] != DENSE).sort_values(["dense", "gap", "contender"])
    return tables.markdown(pd.DataFrame([cells(row) for _, row in order.iterrows()]))


def overview(found: pd.DataFrame) -> str:
    """Return a Markdown table of gaps: a row per contender that several tasks have, a column per task; ✓: closed."""

    def cell(row: pd.Series) -> str:
        digits = _digits(row["unit"])
        if row["contender"] == DENSE:
            return f"{row['score']:.{digits}f}"
        if math.isnan(row["gap"]):
            return "diverged" if row["diverged"] == row["seeds"] else tables.MISSING
        interval = "" if math.isnan(row["high"]) else f" ({row['low']:+.{digits}f} to {row['high']:+.{digits}f})"
        return f"{row['gap']:+.{digits}f}{' ✓' if row['closed'] else ''}{interval}"

    found = found[(found["steps"] == STEPS) & ~found["decays"].astype(bool)]
    found = found[found.groupby("contender")["task"].transform("size") > 1]
    wide = found.assign(cell=[cell(row) for _, row in found.iterrows()])
    wide = wide.pivot(index="contender", columns="task", values="cell").reset_index()
    return tables.markdown(
        wide.assign(dense=wide["contender"] != DENSE).sort_values("dense", kind="stable").drop(columns="dense")
    )


def markdown(frame: pd.DataFrame) -> str:
    """Return all tables as Markdown."""
    found = summary(frame)
    parts = []
    if len(found.loc[found["steps"] == STEPS, "task"].unique()) > 1:
        parts.append(f"### Gaps to dense training after {STEPS} steps\n\n{overview(found)}\n")
    for (name, steps, ranks, decays), rows in found.groupby(GROUP):
        rate = ", with a rate that falls to 0" if decays else ""
        title = f"{name}: {steps} steps, {ranks} ranks{rate}, {MEASURES[rows['unit'].iloc[0]]}"
        parts.append(f"### {title}\n\n{table(rows)}\n")
    return "\n".join(parts)


def picture(frame: pd.DataFrame, method: str = "topk") -> Figure:
    """Draw held-out scores over the steps: dense, and a method with momentum kept, adapted and cancelled.

    Args:
        frame: see :func:`summary`.
        method: the contender.
    """
    names = {DENSE: DENSE, f"{method}:plain": "momentum kept", method: "adapted", f"{method}:cancelled": "cancelled"}
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
