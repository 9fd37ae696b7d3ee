"""The files of a benchmark's report: ``summary.json``, ``table.md`` and ``report.html``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.bench.report import markdown
from experiments.bench.results import Figures, Result
from experiments.output.folder import write_files
from experiments.output.table import as_json

__all__ = ["write"]


def write(result: Result, folder: Path) -> list[Path]:
    """Write ``summary.json``, ``table.md`` and, if the extra "report" is installed, ``report.html``.

    Returns:
        The files that were written.
    """
    rows: list[dict[str, Any]] = [{**asdict(row), "time": row.time and row.time._asdict()} for row in result.rows]
    for row in rows:
        row["speed_up"] = row["speed_up"] and Figures(*row["speed_up"])._asdict()
    summary = {"name": result.name, "launch": result.launch, "notes": result.notes, "rows": rows}

    def pages() -> dict[str, str]:
        from experiments.bench import page  # it needs matplotlib and Jinja2

        return {"report.html": page.html(result)}

    return write_files(folder, {"summary.json": as_json(summary), "table.md": markdown(result)}, pages)
