"""Seconds that numba compiles: a kernel is compiled, or loaded from disk, when it is first called, amid codec work."""

from __future__ import annotations

from threading import Lock

__all__ = ["taken"]

try:
    from numba.core import event
except ImportError:  # the numpy backend serves
    _timer = None
else:
    _timer = event.TimingListener()
    event.register("numba:compiler_lock", _timer)  # held while kernels are compiled or loaded

_lock = Lock()
_told = 0.0


def taken() -> float:
    """Seconds that this process has compiled since this was last asked: each second is told once."""
    global _told
    with _lock:
        now = _timer.duration if _timer is not None and _timer.done else 0.0
        before = _told
        _told = now
        return now - before
