"""``python -m experiments reproduce``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from experiments.commands.shared import FormatOption, console_of, fail
from experiments.output.table import Format


def reproduce(
    paper: Annotated[str, typer.Argument(help="A paper by its method's id, such as gaussiank; or summary.")],
    full: Annotated[
        bool | None,
        typer.Option(
            "--full/--quick",
            help="Long trainings, hours; or at most ten minutes, with fewer settings. Neither: as docs/papers has it.",
            show_default=False,
        ),
    ] = None,
    claims: Annotated[
        str | None, typer.Option(help="Only these, such as S5,S6: the other parts of the page stay as they are.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Folder of Fashion-MNIST's files. Default: where Debian's package puts them.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for the page. Default: build/reproduce/PAPER.")] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", "-j", min=1, help="Trainings side by side. Default: one a core.")
    ] = None,
    form: FormatOption = Format.text,
) -> None:
    """Test a paper's claims on real data, and write a page: claim, how it was tested, picture, number, verdict.

    Writes PAPER.md, PAPER.json and pictures. What was measured is kept in OUTPUT/cache: the same command goes on where
    it was interrupted. `reproduce summary` prints the verdicts of all pages in OUTPUT, build/reproduce by default.

    Exit status: 0; 2 if data is missing; 130 after Ctrl-C.
    """
    from experiments.reproduce import page, papers, run
    from experiments.reproduce.claims import Scale

    console, parent = console_of(), Path("build/reproduce")
    try:
        if paper == "summary":
            page.summary(output or parent).print(console, form)
            return
        found, scale = papers.find(paper), Scale(quick=not full, few=full is False, path=data)
        only = papers.named(found, [id.strip() for id in claims.split(",")]) if claims else None
        run.check(found, scale)
        folder = output or parent / paper
        cores = len(os.sched_getaffinity(0))
        size = {True: " --full", False: " --quick", None: ""}[full]
        line = f"python -m experiments reproduce {paper}{size}{f' --claims {claims}' if claims else ''}"
        files = run.reproduce(found, folder, scale, jobs or cores, console, line, only)
        page.verdicts(folder / f"{paper}.json").print(console, form)
        console.print(f"written: {escape(str(files[-1]))}", highlight=False, soft_wrap=True)
    except KeyboardInterrupt:
        raise fail("interrupted: what was measured is kept, and the same command goes on from there", 130) from None
