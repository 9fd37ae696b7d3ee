"""``python -m hvdcompress.lab.momentum``: run the study, or report its results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hvdcompress.lab.output.console import console_of

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
    from hvdcompress.lab.momentum import contenders as table
    from hvdcompress.lab.momentum import study

    console = console_of()
    try:
        units = study.units_of(tasks.split(","), table.split(contenders), seeds_of(seeds), steps, ranks, decay)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    try:
        failed = study.run_all(units, folder, jobs, console)
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
    from hvdcompress.lab.momentum import report as reporting
    from hvdcompress.lab.momentum import study

    records = study.records(folder)
    if not records:
        raise typer.BadParameter(f"no results in {folder}")
    typer.echo(reporting.markdown(records))
    if save is not None:
        study.save(folder, save)
    if plot is None:
        return
    from hvdcompress.lab.momentum import plots

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
    from hvdcompress.lab.momentum import cost as costs

    try:
        table = costs.measure(methods.split(","), ranks)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    typer.echo(f"{table.title}\n\n{table.markdown()}")


@app.command()
def race(
    contenders: Annotated[
        str,
        typer.Option(help="noop, dense, fp16, ddp_powersgd_r4, …_r2, …_r1, or METHOD as in `run`, with commas."),
    ] = "noop,dense,fp16,ddp_powersgd_r4,ddp_powersgd_r2,topk,topk@density=0.002,scalecom_48x,powersgd_r4",
    seeds: Annotated[str, typer.Option(help="Such as 1-3.")] = "1-3",
    rate: Annotated[str, typer.Option(help="Of each host's link, such as 100mbit or 10gbit.")] = "1gbit",
    steps: Annotated[int, typer.Option(min=20, help="Steps per run.")] = 300,
    target: Annotated[float, typer.Option(help="Accuracy in %.")] = 84.0,
    folder: FolderOption = Path("build/race"),
) -> None:
    """Measure seconds to a target accuracy under DDP, over four emulated hosts. Needs root. Finished runs are kept."""
    from hvdcompress.lab.cluster.hosts import HostsError
    from hvdcompress.lab.cluster.launcher import LaunchError
    from hvdcompress.lab.cluster.rates import Rate
    from hvdcompress.lab.cluster.stopping import Stopped
    from hvdcompress.lab.momentum import contenders as table
    from hvdcompress.lab.momentum import race as racing

    console, names = console_of(), table.split(contenders)
    try:
        Rate.parse(rate)
        for name in names:
            racing.parse(name)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    try:
        racing.run(names, seeds_of(seeds), rate, steps, folder, console)
    except (HostsError, LaunchError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    except Stopped as stopped:
        console.print("interrupted: finished runs are kept, and the same command goes on from there")
        raise typer.Exit(stopped.code) from None
    asked = {(name, seed, rate, steps) for name in names for seed in seeds_of(seeds)}
    keys = ("contender", "seed", "rate", "steps")
    found = [one for one in racing.records(folder) if tuple(one[key] for key in keys) in asked]
    typer.echo(racing.markdown(found, target))


if __name__ == "__main__":
    app()
