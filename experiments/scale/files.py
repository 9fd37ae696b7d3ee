"""The files of a prediction's report: ``scale.json``, ``table.md``, ``report.html`` and plots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.output.folder import write_files
from experiments.output.table import as_json
from experiments.scale.report import Prediction, markdown, notes

__all__ = ["write"]


def write(prediction: Prediction, folder: Path) -> list[Path]:
    """Write ``scale.json`` and ``table.md``; with the extra "report", also ``report.html`` and its plots of seconds.

    Returns:
        The files that were written.
    """
    given: dict[str, Any] = {
        "name": prediction.name,
        "command": prediction.command,
        "notes": notes(prediction),
        "rows": [row.to_dict() for row in prediction.rows],
    }

    def pages() -> dict[str, str]:
        from experiments.scale import page  # it needs matplotlib and Jinja2

        return {"report.html": page.html(prediction), **page.pictures(prediction)}

    return write_files(folder, {"scale.json": as_json(given), "table.md": markdown(prediction)}, pages)
