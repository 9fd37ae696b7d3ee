"""``python -m experiments momentum``: accuracy with and without the optimizer's momentum, over error feedback."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from experiments.configfile import seeds_of
from experiments.units import kept, measure

app = typer.Typer(
    help="Accuracy with and without the optimizer's momentum, over error feedback.",
    no_args_is_help=True,
    add_completion=False,
)


@app.command()
def run(
    tasks: Annotated[str, typer.Option(help="Tasks, with commas: mlp, cnn, mnist_example, lstm, transformer, ….")],
    contenders: Annotated[
        str, typer.Option(help="METHOD[@key=value,…][:plain|:cancelled], or main, defaults, all, remedies, densities.")
    ] = "main",
    seeds: Annotated[str, typer.Option(help="Such as 1-5 or 1,3.")] = "1-3",
    steps: Annotated[int, typer.Option(min=1, help="Steps per run.")] = 1500,
    decay: Annotated[bool, typer.Option("--decay", help="Warm the rate up, and let it fall to 0.")] = False,
    ranks: Annotated[int, typer.Option(min=1, help="Simulated ranks.")] = 2,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Runs side by side, a core each.")] = 1,
    folder: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("runs/momentum"),
) -> None:
    """Train; runs that have a result are skipped."""
    from experiments.momentum import contenders as table
    from experiments.momentum import study

    units = study.units_of(tasks.split(","), table.split(contenders), seeds_of(seeds), steps, ranks, decay)
    measure(units, folder, jobs)


@app.command()
def report(
    folder: Annotated[Path | None, typer.Option(help="Folder of the results. Default: the published ones.")] = None,
    name: Annotated[str, typer.Option(help="Name of the published results.")] = "momentum",
    publish: Annotated[bool, typer.Option("--publish", help="Add them to experiments/results/NAME.json.")] = False,
) -> None:
    """Print a table per task: scores, gaps to dense training, and whether they are closed.

    Of a run that was published already, the newer result is kept.
    """
    import pandas as pd

    from experiments.momentum.report import GROUP, markdown
    from experiments.report import results

    frame = kept(folder) if folder else results.load(name)
    print(markdown(frame))
    if publish:
        every = pd.concat([*([results.load(name)] if (results.FOLDER / f"{name}.json").exists() else []), frame])
        results.save(name, every.drop_duplicates([*GROUP, "contender", "seed"], keep="last"))
