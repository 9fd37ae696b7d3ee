"""The array ops that methods are written in, once for each array library.

``spec`` says what each op does. ``numpy`` is the reference; ``numba`` replaces the ops where a benchmark shows
that compiling pays (it is ``fast``, which CPU drivers use); ``torch`` serves tensors anywhere, and ``triton`` replaces
the ops of which a kernel makes one pass over a GPU's memory (it is ``cuda``, which GPU tensors get). All backends
send the same payload bytes.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from hvdcompress.ops.spec import Ops

if TYPE_CHECKING:  # every backend is an implementation of the spec
    from hvdcompress.ops import numba, numpy, torch, triton

    fast: Ops
    cuda: Ops
    _BACKENDS: tuple[Ops, Ops, Ops, Ops] = (numpy, numba, torch, triton)

__all__ = ["cuda", "fast"]

#: What serves, and what serves where that cannot be imported: correct, and slower.
_CHOICES = {"fast": ("numba", "numpy"), "cuda": ("triton", "torch")}


def __getattr__(name: str) -> Ops:
    """Import a choice when it is first asked for: importing numba takes about a second, too long for a help text."""
    if name not in _CHOICES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    best, other = _CHOICES[name]
    if best == "triton" and "tensorflow" in sys.modules and "triton" not in sys.modules:
        best = other  # both bring LLVM, and Triton's ends the process if TensorFlow's is there
    try:
        backend: Ops = import_module(f"{__name__}.{best}")  # type: ignore[assignment]
    except ImportError:  # not installed, or not for this Python or processor
        backend = import_module(f"{__name__}.{other}")  # type: ignore[assignment]
    globals()[name] = backend
    return backend
