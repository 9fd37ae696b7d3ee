"""Seconds that numba compiles: a kernel is compiled, or loaded from disk, when it is first called, amid codec work."""

from __future__ import annotations

import sys
from threading import Lock

__all__ = ["taken"]

_lock = Lock()
_told = 0.0


def taken() -> float:
    """Seconds that this process has compiled since this was last asked: each second is told once."""
    global _told
    kernels = sys.modules.get("hvdcompress.ops.numba._kernels.compiling")  # not imported here: it imports numba
    with _lock:
        now = kernels.LOCK.seconds if kernels else 0.0
        before = _told
        _told = now
        return now - before
