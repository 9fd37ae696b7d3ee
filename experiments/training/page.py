"""The report of a training as an HTML page."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.output import page
from experiments.output.page import Section
from experiments.training import figures
from experiments.training.report import LEGEND, order_of, tables
from experiments.training.results import Report, Row


def _plots(number: int, rows: Sequence[Row], order: Sequence[str]) -> list[tuple[str, str]]:
    name = f"t{number}"
    drawn = []
    if any(row.results[0].curve.get("loss") for row in rows):
        drawn += [
            ("Loss against steps", figures.loss(rows, order, "step", f"{name}a")),
            ("Loss against bytes sent", figures.loss(rows, order, "bytes_sent", f"{name}b")),
        ]
    if any(row.finished for row in rows):
        drawn += [
            ("What it saves, and what it costs", figures.outcome(rows, order, f"{name}c")),
            ("Where a step's time goes", figures.time_split(rows, f"{name}d")),
        ]
    return drawn


def html(report: Report) -> str:
    """The page: one file that needs nothing else."""
    order = order_of(report)
    details = [
        (word, text)
        for launch in report.launches
        for word, text in (
            ("folder", launch["folder"] if len(report.launches) > 1 else None),
            ("command", launch.get("command")),
            ("commit", (launch.get("commit") or "unknown") + (" (with changes)" if launch.get("dirty") else "")),
            ("versions", ", ".join(f"{name} {value}" for name, value in launch["versions"].items())),
        )
        if text
    ]
    sections = [Section.of(table, _plots(i, table.rows, order)) for i, table in enumerate(tables(report))]
    return page.render(report.name, sections, page.legend(order), LEGEND, report.notes, details)
