"""``python -m experiments quickstart``, ``run`` and ``report``."""

from __future__ import annotations

import contextlib
import importlib.util
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from experiments.commands.shared import RUNS, FormatOption, config_argument, console_of, network_of, split
from experiments.output.table import Format

if TYPE_CHECKING:
    from experiments.cluster.hosts import Hosts
    from experiments.training.experiment import Experiment


class Driver(StrEnum):
    """What the ranks exchange gradients with."""

    horovod = "horovod"
    ddp = "ddp"


RanksOption = Annotated[int | None, typer.Option("-np", "--ranks", min=1, help="Ranks, instead of the file's.")]


def quickstart(
    driver: Annotated[
        Driver | None,
        typer.Option(help="horovod, or PyTorch's ddp, which needs no build. Default: horovod where it is installed."),
    ] = None,
    ranks: RanksOption = None,
    full: Annotated[
        bool, typer.Option("--full", help="Every method, and the transformer on bytes, too: minutes more.")
    ] = False,
) -> None:
    """Train a small net with and without compression, and compare bytes, times and accuracy: about a minute.

    `python -m experiments run quickstart` has more options. Results go to runs/quickstart-ddp, or runs/quickstart.
    """
    from experiments import packaged
    from experiments.cluster import launcher
    from experiments.training.experiment import Experiment

    if driver is None:
        driver = Driver.horovod if launcher.has_horovod() else Driver.ddp
    missing = [name for name in ("torch", "sklearn") if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"the quickstart needs {' and '.join(missing)}: pip install 'hvdcompress[quickstart]'")
    experiment = Experiment.open(packaged.resolve("quickstart", ["experiment"]))
    few = [] if full else ["none", "fp16", "topk", "scalecom over 100x"]
    experiment = experiment.override(ranks, methods=few, tasks=[] if full else ["digits"])
    name = "quickstart-ddp" if driver is Driver.ddp else "quickstart"
    raise typer.Exit(_train(experiment, driver, "mpi", name))


def run(
    config: Annotated[
        str,
        config_argument("An experiment: a YAML file, or a packaged one's name (see configs).", "experiment"),
    ],
    ranks: RanksOption = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the results. Default: runs/NAME, or runs/NAME-2, -3, … where that is taken."),
    ] = None,
    methods: Annotated[str | None, typer.Option(help="Only these methods of the file: labels, with commas.")] = None,
    tasks: Annotated[str | None, typer.Option(help="Only these tasks of the file: labels, with commas.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps per run, instead of the file's.")] = None,
    driver: Annotated[
        Driver, typer.Option(help="Ranks under Horovod, or under PyTorch's DistributedDataParallel over gloo.")
    ] = Driver.horovod,
    gloo: Annotated[bool, typer.Option("--gloo", help="Let Horovod use Gloo instead of MPI.")] = False,
    hosts: Annotated[
        int | None, typer.Option(min=2, help="Emulate so many hosts, with a rank on each; needs root and iproute2.")
    ] = None,
    rate: Annotated[
        str | None, typer.Option(help="Their links' speed: 100mbit, 1gbit, or 10mbit/1gbit to send and to receive.")
    ] = None,
    slow: Annotated[
        list[str] | None, typer.Option(metavar="HOST=RATE", help="A host with another speed, such as 3=10mbit.")
    ] = None,
    delay: Annotated[
        str | None, typer.Option(help="How much later each frame arrives, such as 1ms; needs netem in the kernel.")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on in --out (default: the newest runs/NAME…): finished runs are kept."),
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Empty --out (default: runs/NAME) first.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the ranks' log too.")] = False,
) -> None:
    """Train every task with every method of CONFIG on several ranks, and report.

    Writes config.yaml, launch.json, log.txt, metrics/*.jsonl, summary.json, table.md and report.html. Ctrl-C
    ends every rank, and reports what there is. Exit status: 0; 1 if a run failed; 2 for a bad configuration;
    130 after Ctrl-C.
    """
    from experiments import packaged
    from experiments.training.experiment import Experiment

    experiment = Experiment.open(packaged.resolve(config, ["experiment"]))
    _check_tasks(experiment)
    network = network_of(hosts, rate, slow, delay, ranks)
    if driver is Driver.ddp and (gloo or network):
        raise ValueError("--driver ddp goes over gloo on this machine: leave out --gloo and --hosts")
    experiment = experiment.override(hosts or ranks, steps, split(methods), split(tasks))
    controller = "gloo" if gloo else "mpi"
    raise typer.Exit(_train(experiment, driver, controller, experiment.name, out, resume, overwrite, verbose, network))


def _check_tasks(experiment: Experiment) -> None:
    from experiments.training import launch

    launch.check_tasks(experiment)


def _train(
    experiment: Experiment,
    driver: Driver,
    controller: str,
    name: str,
    out: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    verbose: bool = False,
    network: Hosts | None = None,
) -> int:
    """Train an experiment in a folder of its own; returns the exit status."""
    from experiments.cluster import launcher, notes
    from experiments.output import folder as folders
    from experiments.training import launch
    from experiments.training import run as training

    if driver is Driver.ddp:
        controller = "ddp"
        launch.check_ddp(experiment)
    else:
        launcher.horovodrun()
    folder = folders.choose(RUNS, name, out, resume, overwrite)
    if resume:
        notes.check_link(folder, notes.link(controller, network))
    with folders.users_own(folder):
        launch.prepare(folder, experiment, resume)
    # the hosts are taken down whatever happens
    with folders.users_own(folder), network or contextlib.nullcontext():
        return training.run(experiment, folder, controller, console_of(), verbose, network)


def report(
    folders: Annotated[
        list[Path], typer.Argument(help="Folders that `python -m experiments run` wrote.", metavar="RUN…")
    ],
    out: Annotated[Path | None, typer.Option(help="Where to write. Default: RUN, or runs/compare for several.")] = None,
    form: FormatOption = Format.text,
) -> None:
    """Make the table and the HTML page again, or compare several runs.

    With another --format than "text", the tables are printed, and nothing is written.
    """
    from experiments.training import run as training

    training.publish(folders, out or (folders[0] if len(folders) == 1 else RUNS / "compare"), console_of(), form)
