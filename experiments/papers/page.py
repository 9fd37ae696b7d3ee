"""A paper's page in Markdown, and the table of all papers, from ``papers-PAPER.json`` and nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jinja2

from experiments.report import results

PAPERS = ("scalecom", "gradiveq", "fft", "gaussiank")

__all__ = ["PAPERS", "brief", "overview", "page", "published"]


def page(found: Mapping[str, Any], data: str = "") -> str:
    """Return a paper's page.

    Args:
        found: what ``papers-PAPER.json`` holds.
        data: the link target of that file; by default it is next to the page.
    """
    claims: dict[str, list[Any]] = {}
    for record in found["records"]:
        claims.setdefault(record["claim"], []).append(record)
    first = found["records"][0]
    return _template("page.md.j2").render(
        found, claims=claims, first=first, data=data or f"papers-{found['paper']}.json"
    )


def overview(papers: Iterable[Mapping[str, Any]]) -> str:
    """Return the page with the claims and verdicts of all papers, each given as :func:`page` takes it."""
    return _template("overview.md.j2").render(papers=list(papers))


def published(name: str) -> str:
    """Return the page ``papers/PAPER`` of the documentation, or ``papers/README``, from published results."""
    id = Path(name).name
    found = {each: json.loads((results.FOLDER / f"papers-{each}.json").read_text(encoding="utf-8")) for each in PAPERS}
    if id == "README":
        return overview(found.values())
    return page(found[id], f"../../experiments/results/papers-{id}.json")


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


def _template(name: str) -> jinja2.Template:
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["brief"] = brief
    made.globals["anchor"] = anchor
    return made.get_template(name)
