"""``python -m experiments torture``."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from experiments.commands.shared import RUNS, FormatOption, console_of, fail, split
from experiments.output.table import Format


def torture(
    driver: Annotated[
        str, typer.Option(help="Drivers to try, with commas: mpi, ddp, torch, tensorflow.")
    ] = "mpi,ddp,torch,tensorflow",
    faults: Annotated[int, typer.Option(min=1, help="How many launches, each with one fault.")] = 44,
    seed: Annotated[int, typer.Option(min=0, help="The first launch's; those that follow have seed + 1, ….")] = 0,
    only: Annotated[str | None, typer.Option(help="Only these faults: names, with commas.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the results. Default: runs/torture, or -2, …")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on: launches that were judged are kept.")] = False,
    form: FormatOption = Format.text,
) -> None:
    """Launch short trainings with one fault each, at a moment drawn from a seed, and judge what came of them.

    A launch must recover with nothing lost, or end with one clear error on every rank within 15 s. Anything else is a
    bug, which is listed with the command that shows it again. Exit status: 0; 1 if there was a bug; 2 for bad options;
    130 after Ctrl-C.
    """
    from experiments.cluster.stopping import Stopped
    from experiments.output import folder as folders
    from experiments.torture import report
    from experiments.torture import run as chaos
    from experiments.torture.faults import DRIVERS, FAULTS, Case, chosen

    console = console_of()
    drivers, kinds = chosen(split(driver), DRIVERS, "driver"), chosen(split(only), tuple(FAULTS), "fault")
    folder = folders.choose(RUNS, "torture", out, resume, None)
    cases = [Case.drawn(number, drivers, kinds) for number in range(seed, seed + faults)]
    try:
        with folders.users_own(folder):
            chaos.prepare(folder, {"drivers": drivers, "only": kinds, "seed": seed}, resume)
            chaos.run(folder, cases, lambda words: console_of(stderr=True).print(escape(words), highlight=False))
            chaos.write(folder, shlex.join(["python", "-m", "experiments", *sys.argv[1:]]))
    except Stopped as stopped:
        raise fail("stopped: what was judged is kept, and --resume goes on from there", stopped.code) from None
    found = chaos.records(folder)
    report.table(found).print(console, form)
    if bugs := report.bugs(found):
        console_of(stderr=True).print(escape(bugs), highlight=False, soft_wrap=True)
        raise typer.Exit(1)
