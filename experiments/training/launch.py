"""Launching a training: checking its tasks, preparing its folder, and starting ranks until every run has a result."""

from __future__ import annotations

import importlib.util
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.cluster import launcher
from experiments.cluster.hosts import Hosts
from experiments.cluster.stopping import stoppable
from experiments.output import jsonl
from experiments.training.experiment import Experiment, Run
from experiments.training.tasks import NETS, TASKS, net_of
from experiments.training.watch import Watch
from hvdcompress.registry import suggest

#: what every rank runs: by the experiment's framework under Horovod, or under DDP
MODULES = {
    "torch": "experiments.training.train_torch",
    "tensorflow": "experiments.training.train_tensorflow",
    "ddp": "experiments.training.train_ddp",
}


def check_tasks(experiment: Experiment) -> None:
    """Refuse tasks that do not exist or whose data is not there, before any rank starts.

    Raises:
        ValueError: a task cannot be trained; the message names the file, the line and the key.
    """
    known = TASKS
    for number, task in enumerate(experiment.tasks):
        where = ("tasks", number)
        if task.task not in known:
            hint = suggest(task.task, list(known))
            raise experiment.error(
                (*where, "task"), f"unknown task {task.task!r}{hint}; known: {', '.join(sorted(known))}"
            )
        try:
            net = net_of(task.task, task.net)
        except ValueError as error:
            raise experiment.error((*where, "net"), str(error)) from None
        if experiment.framework not in NETS[net].frameworks:
            raise experiment.error((*where, "task"), f"{task.task!r} has no net for framework {experiment.framework!r}")
        if problem := known[task.task].missing(task.path):
            raise experiment.error((*where, "path"), problem)


def check_ddp(experiment: Experiment) -> None:
    """Refuse what cannot be trained under DDP here.

    Raises:
        ValueError: PyTorch is not installed, or the experiment is of another framework.
    """
    if experiment.framework != "torch":
        raise ValueError(f"--driver ddp is PyTorch's, and {experiment.name!r} is of framework {experiment.framework!r}")
    if importlib.util.find_spec("torch") is None:
        raise ValueError("--driver ddp needs PyTorch: pip install 'hvdcompress[torch]'")


def prepare(folder: Path, experiment: Experiment, resume: bool) -> None:
    """Make a training's folder ready: empty, or with the finished runs of an earlier attempt.

    Args:
        folder: made if it does not exist.
        experiment: what is to be trained; its configuration is written there.
        resume: keep finished runs.

    Raises:
        ValueError: a finished run was made with other settings.
    """
    metrics = folder / "metrics"
    if not resume and folder.exists():
        shutil.rmtree(folder)
    for run in experiment.runs():
        file = metrics / f"{run.id}.jsonl"
        events = jsonl.read(file)
        if not any(event.get("event") == "finished" for event in events):
            file.unlink(missing_ok=True)
        elif changed := _changes(events[0]["spec"], json.loads(json.dumps(run.spec()))):
            raise ValueError(
                f"{file} was made with other settings ({changed}): resume with the same ones, or run without --resume"
            )
    metrics.mkdir(parents=True, exist_ok=True)
    experiment.save(folder / "config.yaml")


def _changes(old: Any, new: Any, key: str = "") -> str:
    """The keys at which two nested dicts differ, with both values; empty if they do not."""
    if isinstance(old, dict) and isinstance(new, dict):
        parts = (_changes(old.get(k), new.get(k), f"{key}.{k}".lstrip(".")) for k in {**old, **new})
        return ", ".join(filter(None, parts))
    return "" if old == new else f"{key}: {old!r} there, {new!r} now"


def follow(
    runs: Sequence[Run], folder: Path, line: Sequence[str], ranks: int, watch: Watch, hosts: Hosts | None = None
) -> None:
    """Launch ranks until every run has a result; a run that kills its ranks is marked as failed, and skipped.

    Args:
        runs: the trainings, in order.
        folder: where they write; ``log.txt`` in it gets all that the ranks print.
        line: the command line that starts the ranks.
        ranks: how many there are.
        watch: is asked which runs have ended, and shows their progress.
        hosts: the emulated hosts that the ranks are on.

    Raises:
        LaunchError: the ranks ended before they began a run.
        Stopped: the user pressed Ctrl-C; every rank has ended.
    """
    log = folder / "log.txt"
    with stoppable():
        while waiting := [run for run in runs if not watch.ended(run)]:
            watch.launching(ranks)
            with launcher.Ranks(line, ranks, log, hosts) as group:
                while group.process.poll() is None:
                    watch.poll()
                    time.sleep(0.1)
            watch.poll()
            left = [run for run in waiting if not watch.ended(run)]
            begun = next((run for run in left if watch.begun(run)), None)
            if left and begun is None and len(left) == len(waiting):
                raise launcher.LaunchError(f"the ranks ended before the first step:\n{launcher.tail(log)}")
            if begun is not None:
                error = f"the ranks ended (exit status {group.process.returncode}) without a message"
                event = {"event": "failed", "error": error, "traceback": launcher.tail(log)}
                file = folder / "metrics" / f"{begun.id}.jsonl"
                jsonl.end_line(file)
                jsonl.append(file, event)
                watch.poll()
