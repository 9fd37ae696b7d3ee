"""Train the runs of an experiment: each is a unit of work, a launch of all ranks whose result is kept."""

from __future__ import annotations

import json
from typing import Any

from experiments.cluster import launch
from experiments.training.experiment import Experiment
from experiments.training.tasks import TASKS, net_of
from experiments.units import Unit

RANK = "experiments.training.rank"  #: the module of every rank


def units_of(experiment: Experiment, driver: str, hosts: int | None, rate: str | None) -> list[Unit]:
    """Return a unit per run.

    Args:
        experiment: what to train.
        driver: "horovod", "gloo" or "ddp".
        hosts: how many emulated hosts the ranks are on; None for none.
        rate: of their links.

    Raises:
        ValueError: a task cannot be trained like this here.
    """
    for task in experiment.tasks:
        net_of(task.task, task.net)
        if problem := TASKS[task.task].missing():
            raise ValueError(problem)
        if task.clip == "before":
            raise ValueError(f"{task.label}: clip must be after, unless ranks are simulated")
    launched = {"driver": driver, "ranks": experiment.ranks, "hosts": hosts, "rate": rate}
    units = []
    for task, method, seed in experiment.runs():
        given = {"task": task.model_dump(), "method": {"seed": seed, **method.settings}, "seed": seed}
        labels = {"task": task.label, "method": method.label, "seed": seed}
        units.append(Unit(train, {"given": given, **launched}, labels, alone=True))
    return units


def train(given: dict[str, Any], driver: str, ranks: int, hosts: int | None, rate: str | None) -> list[dict[str, Any]]:
    """Train one run on all ranks, and return its record.

    Args:
        given: ``task``, ``method`` and ``seed``.
        driver: see :func:`units_of`.
        ranks: how many.
        hosts: emulated ones.
        rate: of their links.

    Raises:
        LaunchError: a rank failed.
    """
    launcher: launch.Driver = "mpi" if driver == "horovod" else "gloo" if driver == "gloo" else "ddp"
    program = ["-m", RANK, json.dumps({"driver": driver, **given})]
    return launch.records(program, ranks, launcher, num_hosts=hosts, rate=rate)
