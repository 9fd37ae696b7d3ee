"""A paper's page, in Markdown with its pictures next to it, and the summary of all papers from their pages' data."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hvdcompress
from experiments.output.table import Column, Table, as_json
from experiments.output.table import folded as folded_text
from experiments.report.results import about
from experiments.reproduce.claims import Claim, Kind, Paper, Picture, Report, Scale

COLUMNS: tuple[Column[dict[str, Any]], ...] = (
    Column("id", "claim", lambda row: row["id"], align="left"),
    Column("says", "what the paper says", lambda row: row["says"], align="left", wrap=True),
    Column("verdict", "here it", lambda row: of_both(row, lambda found: found["verdict"]), align="left", wrap=True),
    Column("number", "number", lambda row: of_both(row, lambda found: found["number"]), align="left", wrap=True),
)
BRIEF: tuple[Column[dict[str, Any]], ...] = (
    Column("id", "claim", lambda row: row["link"], align="left"),
    Column("says", "what the paper says", lambda row: row["says"], align="left", wrap=True),
    Column("verdict", "here it", lambda row: of_both(row, brief), align="left", wrap=True),
)
KEPT = "With the optimizer's momentum kept, as in the paper"
ADAPTED = "With the optimizer's momentum adapted, as is the default of hvdcompress"
READ = (
    "*Holds* means in every condition that was tried; *under 3 of 8 conditions* in these three only, which the claim's "
    "part names. In each condition the rule must be met in every seed.\n"
)


def write(
    paper: Paper, reports: Sequence[tuple[Claim, Report]], folder: Path, command: str, scale: Scale
) -> list[Path]:
    """Write a paper's page, its pictures and its data (``<paper>.md``, ``<paper>-<picture>.svg``, ``<paper>.json``).

    If the reports are of some of the claims only, the other parts of the page in the folder stay as they are.

    Returns:
        The files that were written.
    """
    from experiments.output import plots

    folder.mkdir(parents=True, exist_ok=True)
    seeds = ", ".join(map(str, scale.seeds))
    cpu = about()["machine"]["cpu"]
    made = f"by `{command}` of hvdcompress {hvdcompress.__version__}, on {cpu}, with the seeds {seeds}.\n"
    rows = {claim.id: row(claim, report) for claim, report in reports}
    parts = {claim.id: part(paper.id, claim, report) for claim, report in reports}
    data: dict[str, Any] = {
        "paper": paper.id,
        "title": paper.title,
        "command": command,
        "quick": scale.quick,
        "seeds": list(scale.seeds),
        "version": hvdcompress.__version__,
    }
    head = f"Made {made}"
    if len(reports) < len(paper.claims) and (folder / f"{paper.id}.json").exists():
        data, old_head, old_rows, old_parts = _read(paper.id, folder)
        for id in rows.keys() & old_parts.keys():
            for picture in re.findall(r"\]\((.+\.svg)\)", old_parts[id]):
                (folder / picture).unlink(missing_ok=True)
        head = old_head
        rows = old_rows | {id: {**each, "command": command} for id, each in rows.items()}
        parts = old_parts | {id: f"{text}\n*Measured by itself* {made}" for id, text in parts.items()}
    data["claims"] = [rows[claim.id] for claim in paper.claims if claim.id in rows]
    texts = {
        f"{paper.id}-{name}.svg": plots.alone(picture.svg)
        for _, whole in reports
        for report in (whole, whole.adapted)
        if report is not None
        for name, picture in named_pictures(report, whole)
    }
    texts[f"{paper.id}.json"] = as_json(data)
    texts[f"{paper.id}.md"] = "\n".join(
        [
            f"# {paper.title}: its claims, tested\n",
            f"{paper.source}\n",
            head,
            READ,
            linked(data["claims"]).markdown(),
            *(parts[claim["id"]] for claim in data["claims"]),
        ]
    )
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]


def _read(id: str, folder: Path) -> tuple[dict[str, Any], str, dict[str, Any], dict[str, str]]:
    """A page that was written: its data, by what it was made, and its claims' rows and parts by their ids."""
    data = json.loads((folder / f"{id}.json").read_text(encoding="utf-8"))
    text = (folder / f"{id}.md").read_text(encoding="utf-8")
    top, *parts = re.split(r"\n(?=## \w+: )", text)
    made = next(line for line in top.splitlines(keepends=True) if line.startswith("Made by "))
    rows = {row["id"]: row for row in data.pop("claims")}
    return data, made, rows, dict(zip(rows, parts, strict=True))


def row(claim: Claim, report: Report) -> dict[str, Any]:
    """A claim's line of the summary, as plain data."""
    line = {"id": claim.id, "says": claim.says, **outcome(report)}
    return {**line, "adapted": outcome(report.adapted)} if report.adapted else line


def outcome(report: Report) -> dict[str, str]:
    """Return the verdict and the number as plain data."""
    return {"kind": report.verdict.kind.value, "verdict": str(report.verdict), "number": report.number}


def of_both(line: dict[str, Any], of: Callable[[dict[str, Any]], str]) -> str:
    """Return what a function says of a claim's outcome and, if there is one, of that with momentum adapted."""
    return f"{of(line)}; with momentum adapted: {of(line['adapted'])}" if "adapted" in line else of(line)


def named_pictures(report: Report, whole: Report) -> list[tuple[str, Picture]]:
    """Return a report's pictures with the names of their files; ``whole`` is the report, or the one that it is in."""
    return [(picture.name if report is whole else f"{picture.name}-adapted", picture) for picture in report.pictures]


def part(paper: str, claim: Claim, report: Report) -> str:
    """A claim's part of the page: the number that decides is open, tables are folded."""
    told = row(claim, report)
    texts = [
        f"## {title(told)}\n",
        f"*In the paper:* {claim.where}\n",
        *([f"*Published:* {claim.published}\n"] if claim.published else []),
        f"*How it was tested:* {claim.tested}\n",
        f"*The rule:* {claim.rule}\n",
    ]
    if report.adapted is None:
        return "\n".join([*texts, *findings(paper, report, report)])
    both = [(KEPT, report), (ADAPTED, report.adapted)]
    return "\n".join(
        [*texts, *(line for head, one in both for line in (f"### {head}\n", *findings(paper, one, report)))]
    )


def findings(paper: str, report: Report, whole: Report) -> list[str]:
    """Return what was found, in paragraphs; ``whole`` is the report, or the one that it is in."""
    texts = [f"{said(outcome(report))}\n", f"{report.number}\n"]
    texts += [
        f"![{picture.caption}]({paper}-{name}.svg)\n\n*{picture.caption}*\n"
        for name, picture in named_pictures(report, whole)
    ]
    tables = [f"{table.title}\n\n{table.markdown()}" for table in report.tables]
    if tables:
        texts.append(folded(tables))
    if report.notes:
        texts.append("".join(f"* {note}\n" for note in report.notes))
    return texts


def title(claim: dict[str, Any]) -> str:
    """The heading of a claim's part."""
    return f"{claim['id']}: {claim['says']}"


def brief(claim: dict[str, Any]) -> str:
    """The verdict in a few words: conditions are counted."""
    counted = re.search(r"\((\d+ of \d+)\)$", claim["verdict"])
    if claim["kind"] != Kind.CONDITIONS:
        return str(claim["kind"])
    return f"holds under {counted[1] if counted else 'some'} conditions"


def said(claim: dict[str, Any]) -> str:
    """The verdict as a sentence, with where or why."""
    return f"**It {claim['kind']}**{claim['verdict'].removeprefix(claim['kind'])}."


def folded(texts: Sequence[str]) -> str:
    """Figures that are shown to who asks for them."""
    return folded_text("\n\n".join(text.strip() for text in texts))


def linked(claims: Sequence[dict[str, Any]], page: str = "") -> Table[dict[str, Any]]:
    """Claims and brief verdicts; each claim's id is a link to its part of a page (by default, the same)."""
    rows = []
    for claim in claims:
        anchor = re.sub(r"[^\w\- ]", "", title(claim).lower()).replace(" ", "-")
        rows.append({**claim, "link": f"[{claim['id']}]({page}#{anchor})"})
    return Table(BRIEF, rows)


def verdicts(file: Path) -> Table[dict[str, Any]]:
    """The claims of one page, from the data next to it."""
    return Table(COLUMNS, json.loads(file.read_text(encoding="utf-8"))["claims"])


def summary(folder: Path) -> Table[dict[str, Any]]:
    """All papers' claims and verdicts, from the data next to the pages in the folder and those below it.

    Raises:
        ValueError: there is no page.
    """
    found = {}
    for file in sorted([*folder.glob("*.json"), *folder.glob("*/*.json")]):
        data = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(data, dict) and {"paper", "claims"} <= data.keys():
            found[data["paper"]] = data
    if not found:
        raise ValueError(f"no page in {folder}: `python -m experiments reproduce PAPER` writes one")
    papers = Column[dict[str, Any]]("paper", "paper", lambda row: row["paper"], align="left")
    rows = [{"paper": data["title"], **claim} for data in found.values() for claim in data["claims"]]
    return Table([papers, *COLUMNS], rows)
