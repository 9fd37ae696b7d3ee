"""``python -m experiments.to_accuracy``: train, time, report."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from experiments.momentum.__main__ import seeds_of
from experiments.output.console import console_of

if TYPE_CHECKING:
    from experiments.to_accuracy.run import Setting

app = typer.Typer(
    help="Seconds of training to a target accuracy, over emulated hosts.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class Device(StrEnum):
    """Where nets compute."""

    cpu = "cpu"
    cuda = "cuda"


class Driver(StrEnum):
    """What trains."""

    ddp = "ddp"
    horovod = "horovod"


RacesOption = Annotated[str, typer.Option(help="Trainings, with commas: mlp, cnn, resnet, transformer, lstm.")]
ContendersOption = Annotated[
    str,
    typer.Option(help="noop, dense, fp16, ddp_powersgd_r4, …, or METHOD[@key=value,…][:plain|:cancelled]."),
]
DriverOption = Annotated[Driver, typer.Option(help="Who exchanges gradients.")]
DeviceOption = Annotated[Device, typer.Option(help="cuda: one GPU that all ranks share, over NCCL; DDP only.")]
FolderOption = Annotated[Path, typer.Option(help="Folder of the results, a file per run.")]
CONTENDERS = (
    "dense,fp16,ddp_powersgd_r1,ddp_powersgd_r2,ddp_powersgd_r4,"
    "topk,topk@density=0.002,scalecom_48x,powersgd_r4,acpsgd_r4"
)


def _names(text: str, races: list[str]) -> list[str]:
    from experiments.momentum import contenders as table
    from experiments.to_accuracy.contenders import parse
    from experiments.to_accuracy.races import RACES

    if unknown := [race for race in races if race not in RACES]:
        raise typer.BadParameter(f"unknown race {unknown[0]!r}; available: {', '.join(RACES)}")
    names = table.split(text)
    try:
        for race in races:
            for name in names:
                parse(name, RACES[race].task)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return names


def _setting(folder: Path, driver: Driver, device: Device) -> Setting:
    from experiments.to_accuracy.run import Setting

    if device is Device.cuda and driver is not Driver.ddp:
        raise typer.BadParameter("--device cuda: only DDP trains on a GPU here")
    return Setting(folder, console_of(), driver.value, device.value)


def _do(work: Callable[[], None]) -> None:
    """Do what launches ranks, and end as commands of this package end."""
    from experiments.cluster.hosts import HostsError
    from experiments.cluster.launcher import LaunchError
    from experiments.cluster.stopping import Stopped, stoppable

    try:
        with stoppable():
            work()
    except (HostsError, LaunchError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    except Stopped as stopped:
        typer.echo("interrupted: finished runs are kept, and the same command goes on from there", err=True)
        raise typer.Exit(stopped.code) from None


@app.command()
def train(
    races: RacesOption = "mlp",
    contenders: ContendersOption = CONTENDERS,
    seeds: Annotated[str, typer.Option(help="Such as 1-5 or 1,3.")] = "1-3",
    lrs: Annotated[
        str, typer.Option(help="Factors of the learning rate; the best one of the first seed serves the others.")
    ] = "1",
    rate: Annotated[str | None, typer.Option(help="Train over emulated hosts with such links, and time it.")] = None,
    driver: DriverOption = Driver.ddp,
    device: DeviceOption = Device.cpu,
    folder: FolderOption = Path("build/to_accuracy"),
) -> None:
    """Train each contender once per seed. Trainings that have a result are skipped."""
    from experiments.to_accuracy import run

    chosen, factors = races.split(","), [float(word) for word in lrs.split(",")]
    names = _names(contenders, chosen)
    setting = _setting(folder, driver, device)
    _do(lambda: run.train_all(setting, chosen, names, seeds_of(seeds), factors, rate))


@app.command("time")
def measure(
    races: RacesOption = "mlp",
    contenders: ContendersOption = f"noop,{CONTENDERS}",
    rates: Annotated[str, typer.Option(help="Speeds of each host's link, with commas.")] = "100mbit,1gbit,10gbit",
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each contender.")] = 5,
    turn: Annotated[float, typer.Option(min=0.0, help="Seconds of a turn; it has two steps at least.")] = 2.0,
    driver: DriverOption = Driver.ddp,
    device: DeviceOption = Device.cpu,
    folder: FolderOption = Path("build/to_accuracy"),
) -> None:
    """Measure milliseconds per step, contenders in turns. Needs root. Keep the machine quiet."""
    from experiments.cluster.rates import Rate
    from experiments.to_accuracy import run

    chosen, links = races.split(","), rates.split(",")
    try:
        for link in links:
            Rate.parse(link)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    names = _names(contenders, chosen)
    setting = _setting(folder, driver, device)
    _do(lambda: run.time_all(setting, chosen, names, links, rounds, turn))


@app.command()
def report(
    folder: Annotated[Path, typer.Option(help="Folder of the results, or a file that --save has written.")] = Path(
        "build/to_accuracy"
    ),
    save: Annotated[Path | None, typer.Option(metavar="FILE.json", help="Write all results into one file.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Draw the first training's.")] = None,
) -> None:
    """Print a Markdown table per training and link."""
    from experiments.to_accuracy import report as reporting
    from experiments.to_accuracy import run

    found = reporting.comparisons(folder)
    if not found:
        raise typer.BadParameter(f"no results in {folder}")
    typer.echo(reporting.markdown(found))
    if save is not None:
        run.save(folder, save)
    if plot is not None:
        from experiments.to_accuracy import plots

        first = [each for each in found if each.same_training(found[0])]
        typer.echo(f"written: {plots.draw(first, plot)}")


if __name__ == "__main__":
    app()
