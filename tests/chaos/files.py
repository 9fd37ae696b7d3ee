"""Files of arrays that ranks leave for the test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


def write_arrays(file: Path, **tables: dict[str, Any]) -> None:
    """Write an ``.npz`` file, all or nothing, with each table's arrays as "table.key"."""
    arrays = {f"{what}.{key}": value for what, table in tables.items() for key, value in table.items()}
    temporary = file.with_suffix(".tmp")
    with temporary.open("wb") as stream:
        np.savez(stream, **arrays)
    temporary.rename(file)
