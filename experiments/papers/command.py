"""``python -m experiments reproduce``."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import pandas as pd
import typer

from experiments.configfile import split
from experiments.papers.claims import Paper, Record, over_seeds
from experiments.report import results, tables
from experiments.units import Unit, measure


def measured(paper: Paper, folder: Path, seeds: Sequence[int], jobs: int, only: Sequence[str] = ()) -> list[Record]:
    """Measure what is not yet measured; write ``papers-PAPER.json`` and pictures.

    Args:
        paper: the paper.
        folder: for what is written and the units' results.
        seeds: of each measurement.
        jobs: how many units run side by side.
        only: ids of claims. The other claims of a ``papers-PAPER.json`` in the folder stay as they are.

    Returns:
        One record per verdict.

    Raises:
        Stopped: Ctrl-C; finished units are kept.
        ValueError: there is no such claim.
    """
    needed = [(claim, how, sets) for claim in paper.named(only) for how, sets in claim.needed(seeds).items()]
    found = iter(measure([unit for _, _, sets in needed for units in sets for unit in units], folder, jobs))

    def frame(units: Sequence[Unit]) -> pd.DataFrame:
        return pd.DataFrame([row for _ in units for row in next(found)])

    def medians(units: Sequence[Unit], rows: pd.DataFrame) -> list[Record]:
        labels = [label for label in units[0].labels if label not in ("seed", "momentum")]
        values = [name for name in rows.select_dtypes("number") if name not in (*labels, "seed")]
        table: list[Record] = json.loads(over_seeds(rows, labels, values).to_json(orient="records"))
        return table

    words = ["--quick"] * (len(seeds) == 1) + ["--claims", ",".join(only)] * bool(only)
    command = " ".join(["python -m experiments reproduce", paper.id, *words])  # without folders of this machine
    about = results.about()
    made = {"command": command, "date": about["date"], "cpu": about["machine"]["cpu"], "seeds": seeds}
    records = []
    for claim, how, sets in needed:
        frames = list(map(frame, sets))
        verdict = claim.test(*frames)
        picture = ""
        if verdict.figure:
            from experiments.report import plots  # here, because matplotlib takes long to import

            picture = f"{paper.id}-{claim.id}{'-adapted' if how == 'adapt' else ''}.svg"
            plots.save(verdict.figure, folder / picture)
        medians_of = [medians(units, rows) for units, rows in zip(sets, frames, strict=True)]
        records.append(claim.record(verdict, momentum=how, picture=picture, tables=medians_of, **made))
    file, measured = folder / f"papers-{paper.id}.json", {record["claim"] for record in records}
    earlier = json.loads(file.read_text(encoding="utf-8"))["records"] if only and file.exists() else []
    every = [record for record in earlier if record["claim"] not in measured] + records
    every.sort(key=lambda record: [claim.id for claim in paper.claims].index(record["claim"]))
    whole = pd.DataFrame(every, dtype=object)  # in which counts stay integers
    results.save(file.stem, whole, folder, command=command, paper=paper.id)
    return records


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
    from experiments.training.tasks import TASKS

    found = import_module(f"experiments.papers.{paper}.claims").PAPER
    for task in found.tasks:
        TASKS[task].require()
    folder = output or Path("build/reproduce") / paper
    seeds = (0,) if quick else (0, 1, 2)
    records = measured(found, folder, seeds, jobs or len(os.sched_getaffinity(0)), split(claims))
    lines = [(record["claim"], record["text"], brief(record), record["number"]) for record in records]
    tables.show(pd.DataFrame(lines, columns=["claim", "what the paper says", "here it", "number"]))
    print(f"written: {folder / f'papers-{paper}.json'}")


PAPERS = ("scalecom", "gradiveq", "fft", "gaussiank", "peers")


def context(page: str) -> dict[str, Any]:
    """Return the variables of the page ``papers/PAPER``, or of the overview ``papers/README``.

    A paper has ``claims``, the records of each claim's verdicts by its id, and ``first``, the first of all records.
    """
    id = Path(page).name
    if id == "README":
        return {"papers": {paper: context(paper)["claims"] for paper in PAPERS}, "anchor": anchor}
    found = json.loads((results.FOLDER / f"papers-{id}.json").read_text(encoding="utf-8"))["records"]
    claims: dict[str, list[Any]] = {}
    for record in found:
        claims.setdefault(record["claim"], []).append(record)
    return {"claims": claims, "first": found[0]}


def brief(record: Mapping[str, Any]) -> str:
    """Return a verdict in a few words: conditions are counted, not named.

    >>> brief({"kind": "holds under these conditions", "met": 3, "of": 8, "momentum": "adapt"})
    'with momentum adapted: holds under 3 of 8 conditions'
    """
    told = record["kind"]
    if told == "holds under these conditions":
        counted = f"{record['met']} of {record['of']}" if record["met"] else "some"
        told = f"holds under {counted} conditions"
    return f"with momentum adapted: {told}" if record["momentum"] == "adapt" else told


def anchor(record: Mapping[str, Any]) -> str:
    """Return the anchor that GitHub gives to a claim's heading."""
    return re.sub(r"[^\w\- ]", "", f"{record['claim']}: {record['text']}".lower()).replace(" ", "-")
