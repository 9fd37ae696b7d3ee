"""Array ops: the array functions that methods are written in, implemented once per array library.

``spec`` documents each op. There are four backends, and all of them produce the same payload bytes:

- ``numpy`` is the reference.
- ``numba`` compiles the ops for which a benchmark shows a gain, and uses ``numpy`` for the others. CPU drivers use it
  under the name ``fast``.
- ``torch`` works on tensors of any device.
- ``triton`` has kernels for the ops that then need one pass over GPU memory instead of several, and uses ``torch`` for
  the others. GPU tensors use it under the name ``cuda``.
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

#: name -> (backend, fallback if the backend cannot be imported). The fallback is correct but slower.
_CHOICES = {"fast": ("numba", "numpy"), "cuda": ("triton", "torch")}


def __getattr__(name: str) -> Ops:
    """Import ``fast`` or ``cuda`` on first use: importing numba takes about a second, too long for a help text."""
    if name not in _CHOICES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    best, fallback = _CHOICES[name]
    if best == "triton" and "tensorflow" in sys.modules and "triton" not in sys.modules:
        best = fallback  # both contain LLVM, and Triton's LLVM aborts the process if TensorFlow's is loaded
    try:
        backend: Ops = import_module(f"{__name__}.{best}")
    except ImportError:  # not installed, or not available for this Python version or processor
        backend = import_module(f"{__name__}.{fallback}")
    globals()[name] = backend
    return backend
