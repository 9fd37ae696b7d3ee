"""Tables of the comparison of FSDP2 models."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from experiments.cluster import hosts
from experiments.report import plots, results
from experiments.report.statistics import gaps
from experiments.report.tables import markdown as table

NO_COMMUNICATION, REFERENCE = "copies", "bf16+bf16"


def times(frame: pd.DataFrame) -> pd.DataFrame:
    """Return by rate and contender the medians over turns; communication is what exceeds the step without any.

    Columns: ``ms``, ``communication`` (ms), ``of_bf16`` (its part of that of bf16 on the wire), ``mb``.
    """
    medians = frame.dropna(subset="turn").groupby(["rate", "contender"])[["ms", "bytes"]].median()
    found = []
    for rate, rows in medians.groupby(level="rate"):
        rows = rows.droplevel("rate")
        communication = rows["ms"] - rows["ms"].get(NO_COMMUNICATION, float("nan"))
        communication = communication.drop("stock-bf16", errors="ignore")  # it computes in bfloat16, too
        part = communication / communication.get(REFERENCE, float("nan"))
        found.append(rows.assign(rate=rate, communication=communication, of_bf16=part, mb=rows["bytes"] / 1e6))
    order = ["rate", "contender", "ms", "communication", "of_bf16", "mb"]
    return pd.concat(found).reset_index().sort_values(["rate", "ms"])[order]


def scores(frame: pd.DataFrame) -> pd.DataFrame:
    """Return by contender the bits per byte, their gaps to stock training over the same seeds, and the peak memory."""
    trained = frame.dropna(subset="bits")
    found = gaps(trained, "bits", "contender", "stock", ["seed"])
    memory = trained.groupby("contender")["peak_mb"].median()
    return found.assign(peak_mb=found["contender"].map(memory))


def picture(found: pd.DataFrame) -> Figure:
    """Draw milliseconds per step by rate: computing, and on top of it what communication adds."""
    drawn, panels = plots.figure(found["rate"].nunique())
    for axes, (rate, rows) in zip(panels, found.groupby("rate", sort=False), strict=True):
        rows = rows[rows["communication"] > 0].sort_values("ms", ascending=False)
        axes.barh(rows["contender"], rows["ms"] - rows["communication"], color="0.7", label="computing")
        axes.barh(rows["contender"], rows["communication"], left=rows["ms"] - rows["communication"], label="exchanges")
        axes.set(title=hosts.title(rate), xlabel="ms per step")
    panels[0].legend()
    return drawn


def context(page: str) -> dict[str, Any]:
    """Return the variables of the guide's template: tables of times and of scores, and a picture."""
    frame = results.load("sharded")
    found = times(frame)
    stock = frame.loc[frame["contender"] == "stock", "peak_mb"].median()
    return {"times": found, "scores": scores(frame), "stock_mb": stock, "steps": picture(found)}


def markdown(frame: pd.DataFrame) -> str:
    """Return both tables as Markdown; one that has no results is left out."""
    parts = []
    if "turn" in frame:
        parts.append(table(times(frame), ms="{:.0f}".format, communication="{:.0f}".format, of_bf16="{:.2f}".format))
    if "bits" in frame:
        parts.append(table(scores(frame)))
    return "\n\n".join(parts)
