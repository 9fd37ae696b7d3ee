"""``python -m experiments.momentum``: run the study, or report its results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from experiments.output.console import console_of

app = typer.Typer(
    help="Accuracy with and without the optimizer's momentum, over error feedback.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
FolderOption = Annotated[Path, typer.Option(help="Folder of the results, a file per run.")]


def seeds_of(text: str) -> list[int]:
    """Read seeds such as "1-5" or "1,2,7-9".

    >>> seeds_of("1-3,7")
    [1, 2, 3, 7]
    """
    found: list[int] = []
    for word in text.split(","):
        first, dash, last = word.partition("-")
        found += range(int(first), int(last if dash else first) + 1)
    return found


@app.command()
def run(
    tasks: Annotated[
        str, typer.Option(help="Tasks, with commas: mlp, cnn, mnist_example, lstm, transformer, fnn3, lenet5.")
    ],
    contenders: Annotated[
        str,
        typer.Option(help="METHOD[@key=value,…][:plain|:cancelled], with commas; or main, defaults, all, densities."),
    ] = "main",
    seeds: Annotated[str, typer.Option(help="Such as 1-5 or 1,3.")] = "1-3",
    steps: Annotated[int, typer.Option(min=1, help="Steps per run.")] = 1500,
    decay: Annotated[bool, typer.Option("--decay", help="Warm the rate up, and let it fall to 0.")] = False,
    ranks: Annotated[int | None, typer.Option(min=1, help="Simulated ranks, instead of the task's.")] = None,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Runs side by side, a core each.")] = 1,
    folder: FolderOption = Path("build/momentum"),
) -> None:
    """Train; runs that have a result are skipped. Exit status: 0; 1 if a run failed; 2 for a bad argument; 130."""
    from experiments.momentum import contenders as table
    from experiments.momentum import study

    console = console_of()
    try:
        units = study.units_of(tasks.split(","), table.split(contenders), seeds_of(seeds), steps, ranks, decay)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    try:
        failed = study.run_all(units, folder, jobs)
    except KeyboardInterrupt:
        console.print("interrupted: finished runs are kept, and the same command goes on from there")
        raise typer.Exit(130) from None
    for line in failed:
        typer.echo(f"failed: {line}", err=True)
    raise typer.Exit(1 if failed else 0)


@app.command()
def report(
    folder: Annotated[Path, typer.Option(help="Folder of the results, or a file that --save has written.")] = Path(
        "build/momentum"
    ),
    plot: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Draw scores over the steps.")] = None,
    method: Annotated[str, typer.Option(help="The contender whose forms --plot draws.")] = "topk",
    save: Annotated[Path | None, typer.Option(metavar="FILE.json", help="Write all results into one file.")] = None,
) -> None:
    """Print a Markdown table per task: scores, gaps to dense training, and whether they are closed."""
    from experiments.momentum import report as reporting
    from experiments.momentum import study

    records = study.records(folder)
    if not records:
        raise typer.BadParameter(f"no results in {folder}")
    typer.echo(reporting.markdown(records))
    if save is not None:
        study.save(folder, save)
    if plot is None:
        return
    from experiments.momentum import plots

    for file in plots.draw(reporting.groups_of(records), method, plot):
        typer.echo(f"written: {file}")


@app.command()
def cost(
    methods: Annotated[
        str, typer.Option(help="Methods, with commas.")
    ] = "topk,scalecom_48x,gaussiank,powersgd_r1,powersgd_r4,signsgd",
    ranks: Annotated[int, typer.Option(min=1, help="Simulated ranks.")] = 2,
) -> None:
    """Measure what adapting costs: seconds of handing results over, in copies of the gradient, and memory."""
    from experiments.momentum import cost as costs

    try:
        table = costs.measure(methods.split(","), ranks)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    typer.echo(f"{table.title}\n\n{table.markdown()}")


if __name__ == "__main__":
    app()
