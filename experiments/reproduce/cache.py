"""What units found, kept as JSON: by name, settings and the package's version, so that a run can be taken up again."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import hvdcompress
from experiments.reproduce.claims import Unit


def key(unit: Unit) -> dict[str, Any]:
    """All that a result is good for: function, settings and version, as plain data."""
    measure = f"{unit.measure.__module__}.{unit.measure.__qualname__}"
    return json.loads(
        json.dumps({"measure": measure, "settings": unit.settings, "version": hvdcompress.__version__}, sort_keys=True)
    )


def file_of(folder: Path, unit: Unit) -> Path:
    """The file of a unit's result."""
    digest = hashlib.sha256(json.dumps(key(unit), sort_keys=True).encode()).hexdigest()[:12]
    return folder / f"{unit.name.replace(' ', '-')}-{digest}.json"


def load(folder: Path, unit: Unit) -> dict[str, Any] | None:
    """What a unit found earlier, or None."""
    try:
        record = json.loads(file_of(folder, unit).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):  # not there, or damaged
        return None
    return record["found"] if record.get("key") == key(unit) else None


def save(folder: Path, unit: Unit, found: dict[str, Any], seconds: float) -> None:
    """Keep what a unit found; a file is there whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    file = file_of(folder, unit)
    half = file.with_suffix(f".{os.getpid()}")
    record = {"name": unit.name, "key": key(unit), "seconds": round(seconds, 2), "found": found}
    half.write_text(json.dumps(record) + "\n", encoding="utf-8")
    half.replace(file)
