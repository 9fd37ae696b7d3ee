"""Array ops: the array functions that methods are written in, implemented once per array library.

``spec`` documents each op. There are four backends, and all of them produce the same payload bytes:

- ``numpy`` is the reference.
- ``numba`` compiles the ops for which a benchmark shows a gain, and inherits the others from ``numpy``. CPU drivers use
  it under the name ``fast``.
- ``torch`` works on tensors of any device.
- ``triton`` has kernels for the ops that then need one pass over GPU memory instead of several, and inherits the others
  from ``torch``. GPU tensors use it under the name ``cuda``.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from hvdcompress.ops.spec import Ops

if TYPE_CHECKING:
    fast: Ops
    cuda: Ops

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
        module = import_module(f"{__name__}.{best}")
    except ImportError:  # not installed, or not available for this Python version or processor
        module = import_module(f"{__name__}.{fallback}")
    backend: Ops = module.ops
    globals()[name] = backend
    return backend
