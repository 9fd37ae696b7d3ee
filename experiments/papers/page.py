"""What the pages of papers say of measurements: variables of ``docs/templates/papers``, from ``papers-PAPER.json``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.report import results

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
