"""The drivers, behind one interface: see ``base.py``."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any


def driver_of(name: str, folder: Path) -> Any:
    """Initialize a framework on this rank and return its driver. ``folder``: of this launch, the same on all ranks."""
    return importlib.import_module(f"tests.ranks.drivers.{name}").DRIVER(folder)
