"""The array verbs that methods are written in, once for each array library.

``numpy`` is the reference: simple and obviously right. ``numba`` overrides the verbs where a benchmark
earned it (it is ``fast``, what CPU drivers use); ``torch`` and ``tensorflow`` serve GPUs. All produce the same
payload bytes.
"""

from typing import Any

__all__ = ["fast"]


def __getattr__(name: str) -> Any:
    """``fast``, looked up when first asked for: importing numba takes about a second, which a help text has not."""
    if name != "fast":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from hvdcompress.ops import numba as backend
    except ImportError:  # no numba for this Python or processor: correct, and slower
        from hvdcompress.ops import numpy as backend  # type: ignore[no-redef]
    globals()["fast"] = backend
    return backend
