"""Compile on all processes of a host at the same time, each of them other ops."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvdcompress.ops.numba import NumbaOps, ops
from hvdcompress.ops.numba._kernels.compiling import LOCKS, folder
from hvdcompress.ops.numpy import NumpyOps
from hvdcompress.ops.spec import Ops

__all__ = ["SharedOps", "nothing_is_compiled"]


def nothing_is_compiled() -> bool:
    """Return whether the cache on disk has no compiled kernel at all, as before the first run."""
    return not any(Path(folder()).glob("*.nbc"))


class SharedOps(NumpyOps):
    """The ops of ``ops/numba``, except that an op which another process of this host compiles is ``ops/numpy``'s.

    Both return the same bytes, so that a process which finds an op taken goes on to the next one, and compiles that.

    Attributes:
        skipped: whether ``ops/numpy`` was used: not all ops have been compiled or loaded then.
    """

    def __init__(self) -> None:
        self.skipped = False
        self._folder = folder()
        for name in vars(Ops):
            if name[0] != "_" and getattr(NumbaOps, name) is not getattr(NumpyOps, name):  # it has a kernel
                setattr(self, name, self._shared(name))

    def _shared(self, name: str) -> Callable[..., Any]:
        compiled = getattr(ops, name)
        plain = getattr(self, name)

        def op(*args: Any, **options: Any) -> Any:
            with LOCKS.holding(self._folder, f"op {name}", wait=False) as mine:
                if mine:
                    return compiled(*args, **options)
            self.skipped = True
            return plain(*args, **options)

        return op
