"""Measure what a paper's claims need, and write the results and the pictures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from experiments.papers.claims import Paper, Record
from experiments.papers.frames import over_seeds
from experiments.report import plots, results
from experiments.units import Unit, measure


def reproduce(paper: Paper, folder: Path, seeds: Sequence[int], jobs: int, only: Sequence[str] = ()) -> list[Record]:
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
            picture = f"{paper.id}-{claim.id}{'-adapted' if how == 'adapt' else ''}.svg"
            plots.save(verdict.figure, folder / picture)
        tables = [medians(units, rows) for units, rows in zip(sets, frames, strict=True)]
        records.append(claim.record(verdict, momentum=how, picture=picture, tables=tables, **made))
    file, measured = folder / f"papers-{paper.id}.json", {record["claim"] for record in records}
    earlier = json.loads(file.read_text(encoding="utf-8"))["records"] if only and file.exists() else []
    every = [record for record in earlier if record["claim"] not in measured] + records
    every.sort(key=lambda record: [claim.id for claim in paper.claims].index(record["claim"]))
    whole = pd.DataFrame(every, dtype=object)  # in which counts stay integers
    results.save(file.stem, whole, folder, command=command, paper=paper.id)
    return records
