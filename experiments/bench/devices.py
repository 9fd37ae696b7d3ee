"""Where the arrays of a codec are, in host memory or on a GPU: how to place them and how to time calls on them.

On the CPU the time is that of the calling thread alone, which does not include what other processes take. On a GPU it
is the time between two events, with an idle device before the first and after the second: the host's part is included.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from hvdcompress.method import Array
from hvdcompress.ops import fast
from hvdcompress.ops.spec import Ops


class Cpu:
    """NumPy arrays and the compiled ops, in this thread."""

    ops: Ops = fast

    def array(self, x: Array) -> Array:
        """Return a NumPy array as an array of the device."""
        return x

    def fetch(self, x: Array) -> Array:
        """Return an array of the device as a NumPy array."""
        return x

    def empty(self, n: int) -> Array:
        """Return a float32 array [n] whose memory has been touched."""
        return np.full(n, 0.0, np.float32)

    def timed(self, call: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
        """Call, and return the result and the seconds."""
        began = time.thread_time()
        result = call(*arguments)
        return result, time.thread_time() - began


class Tensors(Cpu):
    """PyTorch tensors on "cuda", an NVIDIA GPU, or on "cpu", where they serve tests."""

    def __init__(self, where: str):
        import torch

        from hvdcompress.ops import cuda
        from hvdcompress.ops.torch import ops as general

        ops: Any = cuda if where == "cuda" else general
        self.ops, self.torch, self.where = ops, torch, where

    def array(self, x: Array) -> Array:
        return self.torch.from_numpy(np.ascontiguousarray(x)).to(self.where)

    def fetch(self, x: Array) -> Array:
        return x.cpu().numpy()

    def empty(self, n: int) -> Array:
        return self.torch.zeros(n, dtype=self.torch.float32, device=self.where)

    def timed(self, call: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
        if self.where == "cpu":
            return super().timed(call, *arguments)
        cuda = self.torch.cuda
        first, last = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        cuda.synchronize()
        first.record()
        result = call(*arguments)
        last.record()
        last.synchronize()
        return result, first.elapsed_time(last) / 1e3


def device(name: str) -> Cpu:
    """Return the device "cpu" or "cuda".

    Raises:
        ValueError: this machine has no GPU.
        ModuleNotFoundError: PyTorch is not installed.
    """
    if name == "cpu":
        return Cpu()
    import torch

    if not torch.cuda.is_available():
        raise ValueError(f"--device cuda: PyTorch {torch.__version__} finds no GPU; use --device cpu")
    return Tensors("cuda")
