"""``python -m experiments reproduce``."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Annotated, Literal

import typer

from experiments.options import split


def reproduce(
    paper: Annotated[
        Literal["scalecom", "gradiveq", "fft", "gaussiank", "peers"], typer.Argument(help="peers: newer methods.")
    ],
    quick: Annotated[bool, typer.Option("--quick", help="One seed instead of three.")] = False,
    claims: Annotated[str | None, typer.Option(help="Only these, such as S5,S6.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for the results. Default: build/reproduce/PAPER.")] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", "-j", min=1, help="Measurements side by side. Default: one a core.")
    ] = None,
) -> None:
    """Test a paper's claims on real data: claim, number, verdict.

    Writes papers-PAPER.json and pictures. With --claims, the other claims of an earlier papers-PAPER.json
    stay. What was measured is kept in OUTPUT/results.jsonl: the same command goes on where it was interrupted.

    Exit status: 0; 2 if data is missing; 130 after Ctrl-C.
    """
    import pandas as pd

    from experiments.papers import run
    from experiments.papers.page import brief
    from experiments.report import tables
    from experiments.training.tasks import TASKS

    found = import_module(f"experiments.papers.{paper}.claims").PAPER
    for task in found.tasks:
        if problem := TASKS[task].missing():
            raise ValueError(f"the data of {task!r} is missing: {problem}")
    folder = output or Path("build/reproduce") / paper
    seeds = (0,) if quick else (0, 1, 2)
    records = run.reproduce(found, folder, seeds, jobs or len(os.sched_getaffinity(0)), split(claims))
    lines = [(record["claim"], record["text"], brief(record), record["number"]) for record in records]
    tables.show(pd.DataFrame(lines, columns=["claim", "what the paper says", "here it", "number"]))
    print(f"written: {folder / f'papers-{paper}.json'}")
