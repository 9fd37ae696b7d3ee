"""From the events of trainings to records, a table and a plot.

A run's record has the columns of the published trainings in ``experiments/results``: ``score`` and ``gap`` (to dense
training with the same seed) in the task's unit, seconds per step, bytes per step and rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from experiments.cluster.rates import title
from experiments.report import jsonl, numbers, plots, results, statistics, tables
from experiments.training.experiment import Experiment
from hvdcompress.cli.numbers import HEADERS, bits_of

LINKS = ("100mbit", "1gbit", "10gbit")  #: for which a step's time is predicted
LAST = 0.05  # the loss is the mean over so much of the steps, at the end
DENSE = "none"
LEGEND = (
    "ratio = dense bytes / bytes sent. step: measured here, where ranks exchange gradients over {link}. predicted: "
    "measured computing and codec time, and the bytes that a rank puts on the wire over a link of that speed, without "
    "overlap and latency. {error}"
)


def records(folders: Sequence[Path]) -> pd.DataFrame:
    """Return a row per run of one training folder or several; runs without a result have NaN.

    Raises:
        ValueError: a folder holds no training.
    """
    rows = []
    for folder in folders:
        if not (folder / "config.yaml").is_file():
            raise ValueError(f"{folder} holds no training: there is no config.yaml")
        for run in Experiment.open(folder / "config.yaml").runs():
            events = jsonl.read(folder / "metrics" / f"{run.id}.jsonl")
            steps, last = [event for event in events if event["event"] == "step"], (1 - LAST) * run.task.steps
            of = {event["event"]: event for event in events}
            end, start = of.get("finished", {}), of.get("start", {})
            row = {
                "task": run.task.label,
                "steps": run.task.steps,
                "parameters": start.get("parameters"),
                "method": f"{folder.name}/{run.method.label}" if len(folders) > 1 else run.method.label,
                "density": run.method.density,
                "seed": run.seed,
                "ranks": run.ranks,
                "error": of.get("failed", {}).get("error"),
                "loss": float(np.mean([each["loss"] for each in steps if each["step"] > last])) if end else None,
                "unit": run.task.metric.unit,
                **{key: end.get(key) for key in ("score", "step_s", "codec_s", "computing_s")},
                **{key: end.get(key) for key in ("sent_bytes", "wire_bytes", "dense_bytes")},
                "scores": [[each["step"], each["score"]] for each in steps if "score" in each],
                "framework": start.get("versions", {}).get("framework"),
            }
            rows.append(row | (start.get("launch") or {}))
    return pd.DataFrame(rows)


def predicted(computing: float, codec: float, wire_bytes: float, link: str) -> float:
    """Return the seconds of a step over a link: computing, codec, and the bytes on the wire with their headers."""
    return computing + codec + 8 * (1 + HEADERS) * wire_bytes / bits_of(link)


def table(frame: pd.DataFrame, task: str) -> str:
    """Return the table of a task in Markdown, a row per method: means over the seeds that are finished.

    Args:
        frame: what :func:`records` returned.
        task: the task's label.
    """
    mine = frame[frame["task"] == task]
    done = mine.dropna(subset=["score"])
    unit, digits = ("accuracy, %", 2) if mine["unit"].iloc[0] == "%" else ("bits per byte", 3)
    dense = next((method for method in done["method"] if method.rpartition("/")[2] == DENSE), DENSE)
    gaps = statistics.gaps(done, "score", "method", dense, ["task", "seed"])
    computing = done["computing_s"].median()  # the same of all methods, so it is measured best over all of them
    formats = {"ratio": numbers.rate_of, unit: f"{{:.{digits}f}}".format, "step, measured": numbers.seconds_of}
    rows = []
    for method, group in mine.groupby("method", sort=False):
        ended = group.dropna(subset=["score"])
        lost = "" if len(ended) == len(group) else f" ({len(group) - len(ended)} of {len(group)} not finished)"
        row: dict[str, Any] = {"method": f"{method}{lost}"}
        row["ratio"] = ended["dense_bytes"].sum() / (ended["sent_bytes"].sum() or float("nan"))
        row[unit] = ended["score"].mean()
        row["against dense"] = None
        for _, gap in gaps[gaps["method"] == method].iterrows() if len(gaps) else ():
            spread = f" ({gap['low']:+.{digits}f} to {gap['high']:+.{digits}f})" if gap["pairs"] > 1 else ""
            row["against dense"] = f"{gap['mean']:+.{digits}f}{spread}".replace("-", "−")
        row["step, measured"] = ended["step_s"].mean()
        for link in LINKS:
            column = f"predicted, {title(link)}"
            row[column] = predicted(computing, ended["codec_s"].mean(), ended["wire_bytes"].mean(), link)
            formats[column] = numbers.seconds_of
        rows.append(row)
    return tables.markdown(pd.DataFrame(rows), **formats)


def publish(folders: Sequence[Path], out: Path) -> None:
    """Print the tables of one training or several, and write ``records.json``, ``table.md`` and ``scores.svg``.

    Args:
        folders: what ``python -m experiments run`` wrote.
        out: where to write.

    Raises:
        ValueError: a folder holds no training.
    """
    frame = records(folders)
    text = []
    for task, rows in frame.groupby("task", sort=False):
        first = rows.iloc[0]
        parameters = rows["parameters"].max()
        size = "" if pd.isna(parameters) else ", " + f"{parameters:,.0f} parameters".replace(",", " ")
        text.append(f"**{task}: {first['steps']} steps, {first['ranks']} ranks{size}**\n\n{table(frame, str(task))}\n")
    links = frame["link"].dropna().unique() if "link" in frame else []
    text.append(LEGEND.format(link=" or ".join(links) or "nothing", error=_error()) + "\n")
    text += [
        f"- {row['task']}, {row['method']}: {row['error']}\n" for _, row in frame.dropna(subset="error").iterrows()
    ]
    print("\n" + "\n".join(text), flush=True)
    (out / "table.md").write_text("\n".join(text), encoding="utf-8")
    results.save("records", frame, out)
    points = frame[frame["scores"].map(len) > 0].explode("scores")
    if len(points):
        points = points.assign(step=points["scores"].str[0], value=points["scores"].str[1].astype(float))
        drawn = plots.lines(points, "step", "value", by="method", panel="task", labels={"value": "held out"})
        plots.save(drawn, out / "scores.svg")
    print(f"written: {out}/table.md, records.json, scores.svg")


def _error() -> str:
    """Return how far predictions were from measured steps, by link."""
    found = results.load("training-predicted")
    worst = (1 - found["predicted_s"] / found["measured_s"]).groupby(found["rate"]).max()
    first, second, last = (f"{worst[link]:.0%} at {title(link)}" for link in LINKS)
    return f"Predictions of uncompressed and fp16 steps of four nets were up to {first}, {second} and {last} too low."
