"""Time that Numba spends compiling. A kernel is compiled, or loaded from disk, on its first call, inside codec work."""

from __future__ import annotations

import sys
from threading import Lock

__all__ = ["take_seconds"]

_lock = Lock()
_reported = 0.0


def take_seconds() -> float:
    """Return the seconds that this process has compiled since the last call of this function."""
    global _reported
    # Not imported here, because the module imports Numba, which takes a second
    kernels = sys.modules.get("hvdcompress.ops.numba._kernels.compiling")
    with _lock:
        now = kernels.LOCKS.seconds if kernels else 0.0
        before = _reported
        _reported = now
        return now - before
