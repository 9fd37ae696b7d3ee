"""Published results: one JSON file each in ``experiments/results``, with what made it.

``docs/build.py`` makes pages, tables and pictures of these files, and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pandas as pd

FOLDER = Path(__file__).resolve().parents[1] / "results"


def save(name: str, records: pd.DataFrame | Sequence[Mapping[str, Any]], folder: Path = FOLDER, **more: Any) -> Path:
    """Write ``folder/name.json``: the records, and what made them.

    Args:
        name: the result's, such as ``bench-resnet50``.
        records: one per measurement, of plain values.
        folder: a run's own folder; by default that of the published results.
        more: further facts, such as ``link=`` or ``settings=``.
    """
    rows = json.loads(pd.DataFrame(records).to_json(orient="records", double_precision=9))
    file = folder / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    head = json.dumps({**about(), **more}, indent=1)[:-2]
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    file.write_text(f'{head},\n "records": [\n  {lines}\n ]\n}}\n', encoding="utf-8")
    return file


def load(name: str, folder: Path = FOLDER) -> pd.DataFrame:
    """Read what :func:`save` wrote; ``frame.attrs`` has what made it.

    Raises:
        FileNotFoundError: there is no such result.
    """
    found = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    frame = pd.DataFrame(found.pop("records"))
    frame.attrs = found
    return frame


def about() -> dict[str, Any]:
    """What makes a result: command, commit (with ``+`` where files differ from it), date, machine."""
    words = ["git", "-C", str(FOLDER), "describe", "--always", "--exclude=*", "--dirty=+"]
    commit = ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        commit = subprocess.run(words, capture_output=True, text=True, timeout=10).stdout.strip()
    cpu = ""
    with contextlib.suppress(OSError):
        names = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        cpu = names[0] if names else ""
    return {
        "command": shlex.join(["python", "-m", "experiments", *sys.argv[1:]]),
        "commit": commit,
        "date": date.today().isoformat(),
        "machine": {"cores": os.cpu_count(), "cpu": cpu, "system": sys.platform},
    }


def append_line(file: Path, record: dict[str, Any]) -> None:
    """Append one record with a single write, on a line of its own even after half of a line."""
    with file.open("a", encoding="utf-8") as stream:
        stream.write("\n" + json.dumps(record))


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the records of a file that may not exist; lines that were cut off are skipped."""
    found = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else ():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found
