"""The array verbs that methods are written in, once for each array library.

``spec`` says what each verb does. ``numpy`` is the reference; ``numba`` replaces the verbs where a benchmark shows
that compiling pays (it is ``fast``, which CPU drivers use); ``torch`` serves tensors on a GPU. All backends send the
same payload bytes.
"""

from typing import TYPE_CHECKING

from hvdcompress.ops.spec import Ops

if TYPE_CHECKING:  # every backend is an implementation of the spec
    from hvdcompress.ops import numba, numpy, torch

    fast: Ops
    _BACKENDS: tuple[Ops, Ops, Ops] = (numpy, numba, torch)

__all__ = ["fast"]


def __getattr__(name: str) -> Ops:
    """Import ``fast`` when it is first asked for: importing numba takes about a second, too long for a help text."""
    if name != "fast":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    backend: Ops
    try:
        from hvdcompress.ops import numba as backend
    except ImportError:  # no numba for this Python or processor: correct, and slower
        from hvdcompress.ops import numpy as backend
    globals()["fast"] = backend
    return backend
