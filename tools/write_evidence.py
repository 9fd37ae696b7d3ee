"""Write what ``hvdcompress advise`` says of accuracy, from the tables of all methods in docs/results.md.

    python tools/write_evidence.py

``--check`` changes nothing and fails if the file is out of date.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from hvdcompress import registry

ROOT = Path(__file__).resolve().parents[1]
SOURCE, FILE = ROOT / "docs" / "results.md", ROOT / "experiments" / "advise" / "evidence.json"
HEADING = "## All methods, on the quickstart's tasks"


def rows(text: str) -> list[dict[str, Any]]:
    """The rows of the section's tables: task, measure, label, method, ratio, held-out and its difference to dense."""
    section = text[text.index(HEADING) :]
    section = section[: section.index("\n## ", 1)]
    found = []
    for title, table in re.findall(r"\*\*(.+?)\*\*\n\n((?:\|.+\n)+)", section):
        task, measure = title.split(":")[0], title.rsplit("held-out ", 1)[1]
        lines = [[cell.strip() for cell in line.strip("|\n ").split(" | ")] for line in table.splitlines()]
        head, _, *body = lines
        for cells in body:
            row = dict(zip(head, cells, strict=True))
            id = row["method"].split()[0]
            if id == "none":
                continue
            assert id in registry.available(), id
            found.append(
                {
                    "method": id,
                    "label": " ".join([row["method"], *([row["density"]] if row["density"] != "–" else [])]),
                    "task": task,
                    "measure": measure,
                    "rate": row["ratio"],
                    "held_out": row["held-out"],
                    "vs_none": row["vs none"],
                }
            )
    return found


def text() -> str:
    """The file's contents."""
    found = {"source": "docs/results.md, all methods, one seed", "rows": rows(SOURCE.read_text(encoding="utf-8"))}
    lines = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in found["rows"])
    return f'{{\n "source": {json.dumps(found["source"])},\n "rows": [\n{lines}\n ]\n}}\n'


def main() -> None:
    """Write, or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        sys.exit(None if FILE.read_text(encoding="utf-8") == text() else f"{FILE.name} is out of date")
    FILE.write_text(text(), encoding="utf-8")


if __name__ == "__main__":
    main()
