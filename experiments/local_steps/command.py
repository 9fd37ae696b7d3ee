"""``python -m experiments local-steps``: accuracy of training that exchanges parameters every few steps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from experiments.options import seeds_of

app = typer.Typer(
    help="Accuracy of training that exchanges parameters every few steps.", no_args_is_help=True, add_completion=False
)
FOLDER = Path("runs/local-steps")


@app.command()
def run(
    tasks: Annotated[str, typer.Option(help="Tasks of the momentum study, with commas: mlp, cnn, transformer, ….")],
    contenders: Annotated[
        str, typer.Option(help="dense and local@every=30,method=topk,…, separated by spaces.")
    ] = "dense local@every=10 local@every=30 local@every=100",
    seeds: Annotated[str, typer.Option(help="Such as 1-5 or 1,3.")] = "1-3",
    steps: Annotated[int, typer.Option(min=1, help="Steps per run.")] = 1500,
    ranks: Annotated[int, typer.Option(min=1, help="Simulated ranks.")] = 4,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Runs side by side, a core each.")] = 1,
    folder: Annotated[Path, typer.Option(help="Folder of the results.")] = FOLDER,
) -> None:
    """Train; runs that have a result are skipped."""
    from experiments.local_steps import study
    from experiments.units import measure

    measure(study.units_of(tasks.split(","), contenders.split(), seeds_of(seeds), steps, ranks), folder, jobs)


@app.command()
def report(
    folder: Annotated[Path | None, typer.Option(help="Folder of the results. Default: the published ones.")] = None,
    publish: Annotated[bool, typer.Option("--publish", help="Write experiments/results/local-steps.json.")] = False,
) -> None:
    """Print a table per task: scores, and gaps to exchanging every step, with paired intervals over the seeds."""
    from experiments.momentum.report import markdown
    from experiments.report import results
    from experiments.units import kept

    frame = kept(folder) if folder else results.load("local-steps")
    print(markdown(frame))
    if publish:
        results.save("local-steps", frame)
