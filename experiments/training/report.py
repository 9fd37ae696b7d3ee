"""From the records of trainings to a table and a plot.

A run's record has the columns of the published trainings in ``experiments/results``: ``score`` and ``gap`` (to dense
training with the same seed) in the task's unit, seconds per step, bytes per step and rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from experiments.cluster.hosts import title
from experiments.report import numbers, plots, results, statistics, tables
from experiments.training.experiment import Experiment
from hvdcompress.cli.numbers import HEADERS, bits_of

LINKS = ("100mbit", "1gbit", "10gbit")  #: for which a step's time is predicted
DENSE = "none"
FIGURES = ("step_s", "codec_s", "computing_s", "sent_bytes", "wire_bytes", "dense_bytes")
LEGEND = (
    "ratio = dense bytes / bytes sent. step: measured here, where ranks exchange gradients over {link}. predicted: "
    "measured computing and codec time, and the bytes that a rank puts on the wire over a link of that speed, without "
    "overlap and latency. {error}"
)


def predicted(computing: float, codec: float, wire_bytes: float, link: str) -> float:
    """Return the seconds of a step over a link: computing, codec, and the bytes on the wire with their headers."""
    return computing + codec + 8 * (1 + HEADERS) * wire_bytes / bits_of(link)


def table(frame: pd.DataFrame, task: str) -> str:
    """Return the table of a task in Markdown, a row per method: means over the seeds that did not diverge.

    Args:
        frame: records of ``run.py``, with ``unit``.
        task: the task's label.
    """
    mine = frame[frame["task"] == task]
    done = mine.dropna(subset=["score"])
    unit, digits = ("accuracy, %", 2) if mine["unit"].iloc[0] == "%" else ("bits per byte", 3)
    gaps = statistics.gaps(done, "score", "method", DENSE, ["task", "seed"])
    computing = done["computing_s"].median()  # the same of all methods, so it is measured best over all of them
    formats = {"ratio": numbers.rate_of, unit: f"{{:.{digits}f}}".format, "step, measured": numbers.seconds_of}
    rows = []
    for method, group in mine.groupby("method", sort=False):
        ended = group.dropna(subset=["score"])
        lost = "" if len(ended) == len(group) else f" ({len(group) - len(ended)} of {len(group)} diverged)"
        row: dict[str, Any] = {
            "method": f"{method}{lost}",
            "ratio": ended["dense_bytes"].sum() / (ended["sent_bytes"].sum() or float("nan")),
            unit: ended["score"].mean(),
            "against dense": None,
        }
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


def publish(experiment: Experiment, frame: pd.DataFrame, link: str, out: Path) -> None:
    """Print the tables of a training, and write ``records.json``, ``table.md`` and ``scores.svg``.

    Args:
        experiment: what was trained.
        frame: a record per run, in the order of the runs.
        link: what the ranks' bytes went over.
        out: where to write.
    """
    runs = experiment.runs()
    frame = frame.reindex(columns=list(dict.fromkeys([*frame, "error", "score", *FIGURES])))
    frame = frame.assign(unit=[run.task.metric.unit for run in runs], density=[run.method.density for run in runs])
    text = []
    for task in experiment.tasks:
        parameters = f"{frame['parameters'][frame['task'] == task.label].max():,}".replace(",", " ")
        about = f"{task.label}: {task.steps} steps, {experiment.ranks} ranks, {parameters} parameters"
        text.append(f"**{about}**\n\n{table(frame, task.label)}\n")
    text.append(LEGEND.format(link=link, error=_error()) + "\n")
    text += [f"- {row.task}, {row.method}: {row.error}\n" for row in frame.dropna(subset="error").itertuples()]
    print("\n" + "\n".join(text), flush=True)
    (out / "table.md").write_text("\n".join(text), encoding="utf-8")
    results.save("records", frame, out, ranks=experiment.ranks, link=link)
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
