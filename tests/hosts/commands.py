"""Start commands, and look at what they leave."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.installed import without_tensorflow


def start_experiments(folder: Path, *words: object) -> subprocess.Popen[str]:
    """Start ``python -m experiments`` in a folder."""
    return subprocess.Popen(
        [sys.executable, "-m", "experiments", *map(str, words)],
        cwd=folder,
        env={**os.environ, "COLUMNS": "200", **without_tensorflow()},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def namespaces(start: str = "hvdc-") -> list[str]:
    """Return the network namespaces of emulated hosts whose names begin with ``start``."""
    names = subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout.split()
    return [name for name in names if name.startswith(start)]


def wait_until(holds: Callable[[], bool], seconds: float = 60) -> bool:
    """Wait until a condition holds, and return whether it does."""
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.1)
    return holds()
