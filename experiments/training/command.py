"""``python -m experiments quickstart`` and ``run``."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from experiments.cluster import launch
from experiments.cluster.command import CountOption, RateOption
from experiments.cluster.hosts import Hosts
from experiments.configfile import config_file, emulated_hosts, split
from experiments.training.experiment import Experiment
from experiments.training.tasks import TASKS, net_of
from experiments.units import Unit, measure

Driver = Literal["horovod", "gloo", "ddp"]
RanksOption = Annotated[int | None, typer.Option("-np", "--ranks", min=1, help="Ranks, instead of the file's.")]
DriverOption = Annotated[
    Driver | None, typer.Option(help="Horovod over MPI or Gloo, or DDP. Default: horovod, or ddp where it is missing.")
]


def quickstart(
    driver: DriverOption = None,
    ranks: RanksOption = None,
    full: Annotated[bool, typer.Option("--full", help="More settings, and text: minutes more.")] = False,
) -> None:
    """Train a small net with and without compression, and compare bytes, accuracy and times: about a minute.

    The table has the step's time as measured here, and as predicted for links of 100 Mbit/s, 1 and 10 Gbit/s.

    Example: python -m experiments quickstart --driver ddp -np 4
    """
    missing = [name for name in ("torch", "sklearn") if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"the quickstart needs {' and '.join(missing)}: pip install 'hvdcompress[quickstart]'")
    experiment = Experiment.open(config_file("quickstart", "experiments"))
    few = [] if full else ["none", "fp16", "topk", "scalecom over 100x"]
    _train(experiment.override(ranks, methods=few, tasks=[] if full else ["digits"]), driver)


def run(
    config: Annotated[str, typer.Argument(help="A YAML file, or the name of one in configs/experiments.")],
    ranks: RanksOption = None,
    methods: Annotated[str | None, typer.Option(help="Only these methods of the file: labels, with commas.")] = None,
    tasks: Annotated[str | None, typer.Option(help="Only these tasks of the file: labels, with commas.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps per run, instead of the file's.")] = None,
    driver: DriverOption = None,
    hosts: CountOption = None,
    rate: RateOption = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the results. Default: runs/NAME, or runs/NAME-DRIVER.")
    ] = None,
) -> None:
    """Train every task with every method and seed of CONFIG on several ranks, and report.

    Writes config.yaml, results.jsonl, records.json, table.md and scores.svg. Runs that have a result are skipped: the
    same command goes on where Ctrl-C or an error ended it.

    Example: sudo python -m experiments run end_to_end --hosts 4 --rate 100mbit
    """
    experiment = Experiment.open(config_file(config, "experiments"))
    experiment = experiment.override(ranks or hosts, steps, split(methods), split(tasks))
    _train(experiment, driver, emulated_hosts(hosts, rate, ranks), out)


def _train(
    experiment: Experiment, driver: Driver | None, network: Hosts | None = None, out: Path | None = None
) -> None:
    import pandas as pd

    from experiments.training.report import publish

    driver = driver or ("horovod" if launch.has_horovod() else "ddp")
    if driver != "ddp" and not launch.has_horovod():
        raise ValueError(f"--driver {driver}: Horovod is not installed for this Python; launch/setup.sh builds it")
    folder = out or Path("runs") / (experiment.name if driver == "horovod" else f"{experiment.name}-{driver}")
    units = units_of(experiment, driver, *((network.count, network.rate) if network else (None, None)))
    place = str(network or f"{experiment.ranks} ranks")
    print(f"{experiment.name}: {len(units)} runs on {place} → {folder}", flush=True)
    found = measure(units, folder, 1)
    experiment.save(folder / "config.yaml")
    link = str(network or ("shared memory" if driver == "horovod" else "TCP on the loopback interface"))
    publish(experiment, pd.DataFrame([row for rows in found for row in rows]), link, folder)


RANK = "experiments.training.loop"  #: the module of every rank


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
        TASKS[task.task].require()
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
    return launch.records(
        ["-m", RANK, json.dumps({"driver": driver, **given})], ranks, launcher, num_hosts=hosts, rate=rate
    )
