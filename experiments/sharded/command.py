"""``python -m experiments sharded``: FSDP2 with a compressed reduce-scatter and all-gather."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from experiments.configfile import seeds_of
from experiments.units import Unit, kept
from experiments.units import measure as carry_out

app = typer.Typer(
    help="FSDP2 with a compressed reduce-scatter and all-gather: times, bytes and accuracy.",
    no_args_is_help=True,
    add_completion=False,
)
FOLDER = Path("runs/sharded")
Width = Annotated[int, typer.Option(help="Width of the transformer.")]
Blocks = Annotated[int, typer.Option(help="Blocks of the transformer.")]
Batch = Annotated[int, typer.Option(help="Windows of 64 bytes per rank and step.")]
Folder = Annotated[Path, typer.Option(help="Folder of the results.")]
RANK = "experiments.sharded.rank"


def launched(given: dict[str, Any], ranks: int, rate: str | None) -> list[dict[str, Any]]:
    """Run ``rank.py`` on every rank, and return its records."""
    from experiments.cluster import launch

    return launch.records(["-m", RANK, json.dumps(given)], ranks, "ddp", rate=rate, timeout=3600)


@app.command()
def time(
    contenders: Annotated[str, typer.Option(help="stock, stock-bf16, copies, or GRADIENTS+PARAMETERS; with commas.")],
    rates: Annotated[str, typer.Option(help="Rates of the emulated links, with commas.")] = "1gbit",
    ranks: Annotated[int, typer.Option(min=2, help="Ranks, one per emulated host.")] = 4,
    width: Width = 384,
    blocks: Blocks = 6,
    batch: Batch = 1,
    steps: Annotated[int, typer.Option(min=1, help="Steps per turn.")] = 5,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each contender.")] = 4,
    folder: Folder = FOLDER,
) -> None:
    """Measure milliseconds and bytes per step; contenders take turns in one launch. A rate with a result is skipped."""
    given = {"kind": "time", "contenders": contenders.split(","), "width": width, "blocks": blocks, "batch": batch}
    given |= {"steps": steps, "turns": turns, "seed": 0}
    units = [
        Unit(launched, {"given": given, "ranks": ranks, "rate": rate}, {"rate": rate, "width": width}, alone=True)
        for rate in rates.split(",")
    ]
    carry_out(units, folder, 1)


@app.command()
def train(
    contenders: Annotated[str, typer.Option(help="As for time.")],
    seeds: Annotated[str, typer.Option(help="Such as 1-3.")] = "1-3",
    ranks: Annotated[int, typer.Option(min=2, help="Ranks on this machine.")] = 2,
    width: Width = 192,
    blocks: Blocks = 3,
    batch: Batch = 8,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a training.")] = 1500,
    folder: Folder = FOLDER,
) -> None:
    """Train, and measure the loss on held-out text in bits per byte. Trainings with a result are skipped."""
    units = []
    for seed in seeds_of(seeds):
        for contender in contenders.split(","):
            labels = {"contender": contender, "seed": seed, "steps": steps, "width": width}
            given = {"kind": "train", **labels, "blocks": blocks, "batch": batch}
            units.append(Unit(launched, {"given": given, "ranks": ranks, "rate": None}, labels))
    carry_out(units, folder, 1)


@app.command()
def report(
    folder: Annotated[Path | None, typer.Option(help="Folder of the results. Default: the published ones.")] = None,
    publish: Annotated[bool, typer.Option("--publish", help="Write them to experiments/results/sharded.json.")] = False,
) -> None:
    """Print times and bytes by rate, and scores with their gaps to stock training."""
    from experiments.report import results
    from experiments.sharded.report import markdown

    frame = kept(folder) if folder else results.load("sharded")
    print(markdown(frame))
    if publish:
        results.save("sharded", frame)
