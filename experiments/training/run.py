"""Train the runs of an experiment: prepare the folder, launch ranks until every run has a result, show progress."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.cluster import launch
from experiments.cluster.hosts import Hosts
from experiments.report import jsonl
from experiments.report.numbers import seconds_of
from experiments.training.experiment import Experiment, Run
from experiments.training.tasks import TASKS, net_of
from hvdcompress.registry import suggest

RANK = "experiments.training.rank"  #: the module of every rank


def check(experiment: Experiment) -> None:
    """Refuse tasks that do not exist, or cannot be trained like this here, before any rank starts.

    Raises:
        ValueError: the message names the file, the line and the key.
    """
    for number, task in enumerate(experiment.tasks):
        if task.task not in TASKS:
            text = f"unknown task {task.task!r}{suggest(task.task, list(TASKS))}; known: {', '.join(TASKS)}"
            raise experiment.error(("tasks", number, "task"), text)
        if problem := TASKS[task.task].missing():
            raise experiment.error(("tasks", number, "task"), problem)
        try:
            net_of(task.task, task.net)
        except ValueError as error:
            raise experiment.error(("tasks", number, "net"), str(error)) from None
        if task.clip == "before":
            raise experiment.error(("tasks", number, "clip"), "must be after, unless ranks are simulated")


def prepare(folder: Path, experiment: Experiment, driver: str, link: str) -> None:
    """Make a training's folder ready; finished runs of an earlier attempt stay.

    Args:
        folder: made if it does not exist.
        experiment: what is to be trained; its configuration is written there.
        driver: what exchanges gradients.
        link: what the ranks' bytes go over.

    Raises:
        ValueError: a finished run was made with other settings, or over another link.
    """
    launched = {"driver": driver, "link": link}
    (folder / "metrics").mkdir(parents=True, exist_ok=True)
    for run in experiment.runs():
        file = folder / "metrics" / f"{run.id}.jsonl"
        events = jsonl.read(file)
        if not any(event["event"] == "finished" for event in events):
            file.unlink(missing_ok=True)
            continue
        old = {**events[0]["spec"], "launch": events[0]["launch"]}
        now = json.loads(json.dumps({**run.spec(), "launch": launched}))
        if changed := [key for key in now if old.get(key) != now[key]]:
            there = {key: old.get(key) for key in changed}
            raise ValueError(f"{file} was made with other settings, {there}: resume with the same, or leave --resume")
    experiment.save(folder / "config.yaml")


def train(experiment: Experiment, folder: Path, driver: str, link: str, hosts: Hosts | None = None) -> bool:
    """Launch ranks until every run has a result; a run that kills its ranks is marked as failed, and skipped.

    Args:
        experiment: what to train.
        folder: what :func:`prepare` has made ready; ``log.txt`` in it gets all that the ranks print.
        driver: "horovod", "gloo" or "ddp".
        link: what the ranks' bytes go over.
        hosts: emulated hosts for the ranks, up.

    Returns:
        Whether every run is finished.

    Raises:
        LaunchError: the ranks ended before they began a run.
        Stopped: Ctrl-C. Every rank has ended, and finished runs are kept.
    """
    program = ("-m", RANK, driver, str(folder), link)
    launcher: launch.Driver = "mpi" if driver == "horovod" else "gloo" if driver == "gloo" else "ddp"
    log, progress = folder / "log.txt", Progress(experiment.runs(), folder)
    while waiting := progress.waiting():
        try:
            launch.run(program, experiment.ranks, launcher, hosts=hosts, log=log, poll=progress)
        except launch.LaunchError as error:
            progress()
            left = progress.waiting()
            begun = next((run for run in left if progress.events[run.id]), None)
            if begun is not None:
                jsonl.append(progress.file(begun), {"event": "failed", "error": str(error).splitlines()[0]})
            elif len(left) == len(waiting):
                raise
            print(f"{error}\nThe whole log: {log}", file=sys.stderr)
    return all(events[-1]["event"] == "finished" for events in progress.events.values())


class Progress:
    """A line per run that has ended.

    Args:
        runs: all of them, in order.
        folder: where they write.
    """

    def __init__(self, runs: Sequence[Run], folder: Path):
        self.runs, self.folder, self.looked = runs, folder, 0.0
        self.events: dict[str, list[dict[str, Any]]] = {}
        self.said = {run.id for run in self.waiting()} ^ {run.id for run in runs}  # by an earlier launch

    def file(self, run: Run) -> Path:
        """Return the file of a run's events."""
        return self.folder / "metrics" / f"{run.id}.jsonl"

    def waiting(self) -> list[Run]:
        """Return the runs that have no result, good or bad."""
        self.events = {run.id: jsonl.read(self.file(run)) for run in self.runs}
        return [run for run in self.runs if not any(e["event"] in ("finished", "failed") for e in self.events[run.id])]

    def __call__(self) -> None:
        """Read what is new, and print it."""
        if time.monotonic() < self.looked + 0.5:
            return
        self.looked = time.monotonic()
        waiting = self.waiting()
        for number, run in enumerate(self.runs, 1):
            if run not in waiting and run.id not in self.said:
                self.said.add(run.id)
                end = next(e for e in self.events[run.id] if e["event"] in ("finished", "failed"))
                unit = run.task.metric.unit
                words = end.get("error") or f"{end['score']:.2f} {unit}, {seconds_of(end['step_s'])} per step"
                seed = f" seed {run.seed}" if run.seed else ""
                print(f"[{number}/{len(self.runs)}] {run.task.label} {run.method.label}{seed}: {words}", flush=True)
