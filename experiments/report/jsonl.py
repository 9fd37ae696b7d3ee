"""Files of JSON lines that grow while they are read. A process that is killed may leave half of a line behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def append(file: Path, record: dict[str, Any]) -> None:
    """Append one record with a single write, on a line of its own even after half of a line."""
    with file.open("a", encoding="utf-8") as stream:
        stream.write("\n" + json.dumps(record))


def read(file: Path) -> list[dict[str, Any]]:
    """Return the records of a file that may not exist; lines that were cut off are skipped."""
    found = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found
