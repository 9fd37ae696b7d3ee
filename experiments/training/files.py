"""The files of a training's report: ``summary.json``, ``table.md`` and ``report.html``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.output.folder import write_files
from experiments.output.table import as_json
from experiments.training.report import markdown
from experiments.training.results import Report

__all__ = ["summary", "write"]


def summary(report: Report) -> dict[str, Any]:
    """The figures as plain data, in seconds and bytes."""
    rows = []
    for row in report.rows:
        runs = [{k: v for k, v in asdict(r).items() if k not in ("curve", "start")} for r in row.results]
        rows.append({**{k: v for k, v in asdict(row).items() if k != "results"}, "runs": runs})
    return {"name": report.name, "launches": report.launches, "notes": report.notes, "rows": rows}


def write(report: Report, folder: Path) -> list[Path]:
    """Write ``summary.json``, ``table.md`` and, if the extra "report" is installed, ``report.html``.

    Returns:
        The files that were written.
    """

    def pages() -> dict[str, str]:
        from experiments.training import page  # it needs matplotlib and Jinja2

        return {"report.html": page.html(report)}

    return write_files(folder, {"summary.json": as_json(summary(report)), "table.md": markdown(report)}, pages)
