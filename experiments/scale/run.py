"""Fitted constants, and times from words."""

from __future__ import annotations

import re
from pathlib import Path

from experiments import packaged
from experiments.scale.cost import Driver

FITTED: dict[Driver, Path] = {
    "horovod": packaged.FOLDER / "bench" / "fit.json",
    "mpi4py": packaged.FOLDER / "bench" / "fit_mpi.json",
}  #: the constants that come with the package


def seconds(text: str) -> float:
    """Parse a time: "20us", "0.5ms" or "1s".

    Raises:
        ValueError: it is not a time.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", text.strip())
    if not match:
        raise ValueError(f"{text!r} is not a time: write 20us, 0.5ms or 1s")
    return float(match[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[match[2]]
