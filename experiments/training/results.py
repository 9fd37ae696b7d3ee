"""From a training's folder to figures: what every run measured, and means over seeds.

``runs/<name>/`` holds ``config.yaml``, ``launch.json``, ``log.txt`` and ``metrics/<run>.jsonl``; it can also be read
after an interrupted run.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.output import jsonl
from experiments.training.experiment import Experiment, Run

__all__ = ["Report", "Result", "Row", "read"]


@dataclass
class Result:
    """One run: what it is, how it ended, its curve and its figures (per step and rank, seconds and bytes)."""

    id: str
    task: str
    method: str
    density: float | None
    seed: int
    steps: int
    status: str  # finished, failed, interrupted or not started
    error: str = ""
    curve: dict[str, list[float]] = field(default_factory=dict)  # step, loss, bytes_sent, seconds
    figures: dict[str, float] = field(default_factory=dict)
    metric: dict[str, Any] = field(default_factory=dict)
    start: dict[str, Any] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    training: dict[str, float | str] = field(default_factory=dict)  # what this method changes in the task


@dataclass
class Row:
    """A line of a table: one method on one task, over its seeds."""

    task: str
    method: str
    density: float | None
    results: list[Result]
    mean: dict[str, float] = field(default_factory=dict)
    std: dict[str, float] = field(default_factory=dict)

    @property
    def finished(self) -> list[Result]:
        """The runs that have a final measurement."""
        return [result for result in self.results if result.status == "finished"]

    @property
    def unit(self) -> str:
        """The measurement's unit; empty if nothing was measured."""
        return next((result.metric["unit"] for result in self.finished), "")

    @property
    def remark(self) -> str:
        """How many runs did not finish, and why; empty if all did."""
        counts: dict[str, int] = {}
        for result in self.results:
            words = result.status
            if result.status == "interrupted":
                words += f" at step {int(result.curve['step'][-1]) if result.curve['step'] else 0}"
            counts[words] = counts.get(words, 0) + 1
        counts.pop("finished", None)
        many = len(self.results) > 1
        return ", ".join(f"{n} of {len(self.results)} {word}" if many else word for word, n in counts.items())


@dataclass
class Report:
    """The content of tables and pages: rows, notes, and how the runs were launched."""

    name: str
    rows: list[Row]
    notes: list[str]
    launches: list[dict[str, Any]]

    def tasks(self) -> dict[str, list[Row]]:
        """Rows by task, in the experiment's order."""
        grouped: dict[str, list[Row]] = {}
        for row in self.rows:
            grouped.setdefault(row.task, []).append(row)
        return grouped

    def methods(self) -> list[str]:
        """Labels in the order of their first row; a label's colour is its place here."""
        return list(dict.fromkeys(row.method for row in self.rows))


def _result(run: Run, events: Sequence[dict[str, Any]]) -> Result:
    last: dict[str, dict[str, Any]] = {event["event"]: event for event in reversed(events) if "event" in event}
    steps = [event for event in events if event.get("event") == "step"]
    end = last.get("finished", {})
    status = "failed" if "failed" in last else "finished" if end else "interrupted" if last else "not started"
    result = Result(
        id=run.id,
        task=run.task.label,
        method=run.method.label,
        density=last["start"].get("density") if "start" in last else run.method.density,
        seed=run.seed,
        steps=run.task.steps,
        status=status,
        error=last.get("failed", {}).get("error", ""),
        curve={key: [event[key] for event in steps] for key in ("step", "loss", "bytes_sent", "seconds")},
        metric=end.get("metric", {}),
        start=last.get("start", {}),
        counters=end.get("counters", {}),
        training=run.method.training,
    )
    if steps:
        tail = steps[-max(1, len(steps) // 20) :]  # one batch's loss says little
        result.figures["loss"] = statistics.fmean(event["loss"] for event in tail)
        sent, dense = steps[-1]["bytes_sent"], steps[-1]["dense_bytes"]
        result.figures["sent"] = sent / steps[-1]["step"]
        result.figures["rate"] = dense / sent if sent else math.nan
    if end:
        result.figures |= _totals(end)
    return result


def _totals(end: dict[str, Any]) -> dict[str, float]:
    """Figures per step and rank from the totals that each rank reported."""
    mean = {key: statistics.fmean(values) for key, values in end["ranks"].items()}
    sent, steps = mean["bytes_sent"], end["steps"]
    select, communicate = mean["select_seconds"], mean["communicate_seconds"]
    return {
        "value": end["metric"]["value"],
        "rate": mean["dense_bytes"] / sent if sent else math.nan,
        "dense": mean["dense_bytes"] / steps,
        "sent": sent / steps,
        "on_wire": mean["bytes_on_wire"] / steps,
        "total": mean["total_seconds"],
        "select": select,
        "communicate": communicate,
        "rest": mean["total_seconds"] - select - communicate,
    }


def _rows(results: Iterable[Result]) -> list[Row]:
    groups: dict[tuple[str, str], Row] = {}
    results = list(results)
    baseline = {(r.task, r.seed): r for r in results if r.method == "none" and r.status == "finished"}
    for result in results:
        row = groups.setdefault((result.task, result.method), Row(result.task, result.method, result.density, []))
        row.results.append(result)
        dense = baseline.get((result.task, result.seed))
        if dense and result.status == "finished" and dense is not result:
            result.figures["difference"] = result.figures["value"] - dense.figures["value"]
    for row in groups.values():
        known = row.finished or [r for r in row.results if r.figures]
        for key in {key for result in known for key in result.figures}:
            values = [result.figures[key] for result in known if key in result.figures]
            row.mean[key] = statistics.fmean(values)
            spread = len(values) > 1 and all(map(math.isfinite, values))
            row.std[key] = statistics.stdev(values) if spread else 0.0
    return list(groups.values())


def read(folders: Sequence[Path]) -> Report:
    """Read the results in one run's folder, or in several to be compared.

    Raises:
        ValueError: a folder holds no run.
    """
    rows: list[Row] = []
    launches = []
    for folder in folders:
        if not (folder / "config.yaml").is_file():
            raise ValueError(f"{folder} holds no run: it has no config.yaml")
        experiment = Experiment.open(folder / "config.yaml")
        results = [_result(run, jsonl.read(folder / "metrics" / f"{run.id}.jsonl")) for run in experiment.runs()]
        found = _rows(results)
        if len(folders) > 1:
            for row in found:
                row.method = f"{folder.name}/{row.method}"
        rows += found
        file = folder / "launch.json"
        launch = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        versions: dict[str, str] = next((r.start["versions"] for r in results if r.start), {})
        head = {"folder": folder.name, "ranks": experiment.ranks, "framework": experiment.framework}
        launches.append({**head, **launch, "versions": versions})
    name = folders[0].resolve().name if len(folders) == 1 else " vs ".join(f.resolve().name for f in folders)
    order = list(dict.fromkeys(row.task for row in rows))
    rows.sort(key=lambda row: order.index(row.task))
    return Report(name, rows, _notes(launches, rows), launches)


def _notes(launches: Sequence[dict[str, Any]], rows: Sequence[Row]) -> list[str]:
    """What a reader must know to read the figures correctly."""
    notes = []
    for launch in launches:
        machine = launch.get("machine", {})
        cores = machine.get("cores") or os.cpu_count() or 1
        tcp = any(word in launch.get("command", "") for word in ("--gloo", "torch.distributed.run"))
        link = "TCP on the loopback interface" if tcp else "shared memory"
        words = [f"{cores} cores", *([machine["cpu"]] if machine.get("cpu") else [])]
        prefix = f"{launch['folder']}: " if len(launches) > 1 else ""
        if launch["ranks"] == 1:
            notes.append(f"{prefix}one rank on one machine ({', '.join(words)}): alone, it sends nothing.")
            continue
        shared = ["more ranks than cores"] if launch["ranks"] > cores else []
        if "reached" in launch:
            notes.append(
                f"{prefix}{launch['ranks']} ranks on {launch['link']} of one machine ({', '.join(words + shared)}): "
                "the links have that speed, while the hosts share the machine's processors. A TCP stream from each "
                f"host to the next, all at once, got across {', '.join(launch['reached'])}."
            )
            continue
        words += [f"over {link}", *shared]
        notes.append(
            f"{prefix}{launch['ranks']} ranks on one machine ({', '.join(words)}): bytes are counted as handed to "
            "the collectives, and carry over to any network; times do not."
        )
    notes += [_framework(launch) for launch in launches if launch.get("versions")]
    seeds = max((len(row.finished) for row in rows), default=0)
    if seeds > 1:
        notes.append(f"Mean ± standard deviation over {seeds} seeds; differences are taken seed by seed.")
    for row in rows:
        settings = [item for r in row.results for item in r.training.items()]
        changed = {f"{key} {value}" if isinstance(value, str) else f"{key} {value:g}" for key, value in settings}
        if changed:
            notes.append(f"{row.task}, {row.method}: trained with {', '.join(sorted(changed))}, unlike the others.")
        notes += sorted({f"{row.task}, {row.method}: {r.error}" for r in row.results if r.error})
    return notes


def _framework(launch: dict[str, Any]) -> str:
    title, limits = {
        "torch": ("PyTorch", ""),
        "tensorflow": (
            "TensorFlow",
            ", in whose graphs waiting for other ranks cannot be told from computing: those columns are left open",
        ),
    }[launch["framework"]]
    if "torch.distributed.run" in launch.get("command", ""):
        title = "DistributedDataParallel of PyTorch"
        limits = ", which waits for other ranks inside the backward pass: that column is left open"
    version = launch["versions"].get(launch["framework"], "")
    return f"Trained in {launch['folder']} with {title} {version}{limits}."
