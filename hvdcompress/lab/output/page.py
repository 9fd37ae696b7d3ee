"""The report as one HTML file that needs nothing else: style, tables and plots are inside."""

from __future__ import annotations

from typing import Any

import jinja2

from hvdcompress.lab.output import plots
from hvdcompress.lab.training import tables
from hvdcompress.lab.training.report import Report, Row


def _section(number: int, rows: list[Row], order: list[str]) -> dict[str, Any]:
    name = f"t{number}"
    drawn = []
    if any(row.results[0].curve.get("loss") for row in rows):
        drawn += [
            ("Loss against steps", plots.loss(rows, order, "step", f"{name}a")),
            ("Loss against bytes sent", plots.loss(rows, order, "bytes_sent", f"{name}b")),
        ]
    if any(row.finished for row in rows):
        drawn += [
            ("What it saves, and what it costs", plots.outcome(rows, order, f"{name}c")),
            ("Where a step's time goes", plots.time_split(rows, f"{name}d")),
        ]
    return {
        "heading": tables.heading(rows),
        "plots": drawn,
        "rows": [
            {
                "number": order.index(row.method) % plots.SERIES,
                "failed": any(result.status == "failed" for result in row.results),
                "cells": [(column.key, column.cell(row)) for column in tables.COLUMNS],
            }
            for row in rows
        ],
    }


def render(**values: Any) -> str:
    """The page's template, filled in."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("hvdcompress"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("report.html.j2").render(**values)


def html(report: Report) -> str:
    """The page."""
    order = report.methods()
    if "none" in order:  # its colour is the neutral one
        order.remove("none")
        order.insert(0, "none")
    legend = [
        {"label": method, "number": i % plots.SERIES, "dashes": " ".join(map(str, plots.dashes(i)))}
        for i, method in enumerate(order)
    ]
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
    sections = [_section(i, rows, order) for i, rows in enumerate(report.tasks().values())]
    return render(
        name=report.name,
        sections=sections,
        legend=legend,
        columns=tables.COLUMNS,
        key=tables.LEGEND,
        notes=report.notes,
        details=details,
    )
