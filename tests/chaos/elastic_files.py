"""What the elastic trainings of the tests have alike: their tensors and steps, and the files that they leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

SHAPES, COMMIT, LOST, MORE = {"w": (48, 64), "b": (64,)}, 3, 7, 6
PAUSE = 0.1  #: seconds between steps
TIMEOUT = 25  #: `end_after`; more than Horovod needs to see that a peer is gone, by HOROVOD_GLOO_TIMEOUT_SECONDS


def write(file: Path, **tables: dict[str, Any]) -> None:
    """Write arrays, all or nothing."""
    arrays = {f"{what}.{key}": value for what, table in tables.items() for key, value in table.items()}
    temporary = file.with_suffix(".tmp")
    with temporary.open("wb") as stream:
        np.savez(stream, **arrays)
    temporary.rename(file)
