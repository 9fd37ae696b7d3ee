"""``python -m experiments time-to-accuracy``: train, time, report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from experiments.configfile import seeds_of

app = typer.Typer(
    help="Seconds of training that each contender needs to a target accuracy, over emulated links.",
    no_args_is_help=True,
    add_completion=False,
)


RacesOption = Annotated[str, typer.Option(help="Trainings, with commas: mlp, cnn, resnet, transformer, lstm.")]
ContendersOption = Annotated[
    str, typer.Option(help="noop, dense, fp16, ddp_powersgd_r4, …, or METHOD[@key=value,…][:plain|:cancelled].")
]
DriverOption = Annotated[Literal["ddp", "horovod"], typer.Option(help="Who exchanges gradients.")]
DeviceOption = Annotated[Literal["cpu", "cuda"], typer.Option(help="cuda: one GPU for all ranks; DDP only.")]
FolderOption = Annotated[Path, typer.Option(help="Folder of the results.")]
FOLDER = Path("runs/to-accuracy")
CONTENDERS = (
    "dense,fp16,ddp_powersgd_r1,ddp_powersgd_r2,ddp_powersgd_r4,"
    "topk,topk@density=0.002,scalecom_48x,powersgd_r4,acpsgd_r4"
)


def _names(text: str, races: list[str]) -> list[str]:
    """Return the contenders of a list, all of which the races' optimizers can have."""
    from experiments.momentum import contenders
    from experiments.to_accuracy.races import RACES, parse

    if unknown := [race for race in races if race not in RACES]:
        raise ValueError(f"unknown race {unknown[0]!r}; available: {', '.join(RACES)}")
    names = contenders.split(text)
    for race in races:
        for name in names:
            parse(name, RACES[race].task)
    return names


@app.command()
def train(
    races: RacesOption = "mlp",
    contenders: ContendersOption = CONTENDERS,
    seeds: Annotated[str, typer.Option(help="Such as 1-5 or 1,3.")] = "1-3",
    driver: DriverOption = "ddp",
    device: DeviceOption = "cpu",
    folder: FolderOption = FOLDER,
) -> None:
    """Train each contender once per seed. Trainings that have a result are skipped.

    Accuracy per step does not depend on the link, so it is measured without one. To try several learning rates, name
    a contender with each of them: topk,topk@lr=2. The report takes the one that was best on the first seed.
    """
    from experiments.to_accuracy.run import Setting, train_all

    chosen = races.split(",")
    train_all(Setting(folder, driver, device), chosen, _names(contenders, chosen), seeds_of(seeds))


@app.command("time")
def measure(
    races: RacesOption = "mlp",
    contenders: ContendersOption = f"noop,{CONTENDERS}",
    rates: Annotated[str, typer.Option(help="Speeds of each host's link, with commas.")] = "100mbit,1gbit,10gbit",
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each contender.")] = 5,
    turn: Annotated[float, typer.Option(min=0.0, help="Seconds of a turn; it has two steps at least.")] = 2.0,
    driver: DriverOption = "ddp",
    device: DeviceOption = "cpu",
    folder: FolderOption = FOLDER,
) -> None:
    """Measure milliseconds per step, and on a processor, contenders in turns. Needs root. Keep the machine quiet."""
    from experiments.to_accuracy.run import Setting, time_all

    chosen = races.split(",")
    time_all(Setting(folder, driver, device), chosen, _names(contenders, chosen), rates.split(","), rounds, turn)


@app.command()
def report(
    folder: Annotated[Path | None, typer.Option(help="Folder of the results. Default: the published ones.")] = None,
    trainings: Annotated[
        bool,
        typer.Option("--published-trainings", help="Add the published trainings, which no machine's speed changes."),
    ] = False,
    name: Annotated[str, typer.Option(help="Name of the published results.")] = "to-accuracy",
    publish: Annotated[bool, typer.Option("--publish", help="Write experiments/results/NAME.json.")] = False,
) -> None:
    """Print a table per training and link."""
    import pandas as pd

    from experiments.report import results, tables
    from experiments.to_accuracy.report import comparisons, table
    from experiments.units import kept

    found = kept(folder) if folder else results.load(name)
    if trainings:
        others = results.load("to-accuracy")
        found = pd.concat([others[others["kind"] == "train"], found])
    formats = dict.fromkeys(("milliseconds", "p95", "longest", "processor"), "{:.0f}")
    formats |= {"rate": "{:g}", "steps": "{:.0f}", "seconds": "{:.1f}", "score": "{:.3f}", "at_equal_time": "{:.3f}"}
    for title, rows in comparisons(found):
        tables.show(table(rows), f"\n### {title}\n", **{column: text.format for column, text in formats.items()})
    if publish:
        results.save(name, found)
