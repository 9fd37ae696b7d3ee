"""Where a codec's arrays lie, in the processor's memory or a GPU's: how to make them, copy them and time calls on them.

On the processor, time is that of the calling thread alone, which does not count what other processes take. On a GPU it
is that between two events, with the device idle before the first and after the second: the host's part is in it.
"""

from __future__ import annotations

import platform
import resource
import sys
import time
import tracemalloc
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvdcompress.method import Array
from hvdcompress.ops.spec import Ops

__all__ = ["DEVICES", "Cost", "Cpu", "Cuda", "Device", "device", "machine"]

#: whose page faults are counted: this thread's, where the system can tell
WHOSE = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)


@dataclass
class Cost:
    """What calls took."""

    seconds: float = 0.0
    faults: float = 0.0
    """Page faults: pages of memory that were touched for the first time."""
    fresh: float = 0.0
    """Bytes of fresh memory: of each call, the most that it held at once beyond what was there before it."""

    def add(self, other: Cost, share: float = 1.0) -> None:
        """Add a share of another cost."""
        self.seconds += share * other.seconds
        self.faults += share * other.faults
        self.fresh += share * other.fresh


Gauge = Callable[..., tuple[Any, Cost]]  #: (call, arguments…) -> what the call returned, and what it took


class Device(ABC):
    """Arrays of one library on one device."""

    ops: Ops
    """The array ops."""
    faults: bool = False
    """Whether page faults are counted."""

    @abstractmethod
    def array(self, x: Any) -> Array:
        """Return a numpy array as the device's."""

    @abstractmethod
    def fetch(self, x: Array) -> Any:
        """Return an array of the device's as a numpy array."""

    @abstractmethod
    def empty(self, n: int) -> Array:
        """Return a float32 array [n] whose memory has been touched."""

    @abstractmethod
    def copy(self, to: Array, x: Array) -> None:
        """Copy an array over another one: the unit of all figures."""

    @abstractmethod
    def combine(self, weights: Any, rows: Array, out: Array) -> None:
        """Write weights [m] times rows [m, n], the weights being a numpy array, to ``out`` [n]."""

    @abstractmethod
    def timed(self, call: Callable[..., Any], *arguments: Any) -> tuple[Any, Cost]:
        """Call, and say how long it took and how many page faults there were."""

    @abstractmethod
    def traced(self, call: Callable[..., Any], *arguments: Any) -> tuple[Any, Cost]:
        """Call, and say how much fresh memory it took. Inside of :meth:`tracing`."""

    @abstractmethod
    def tracing(self, on: bool) -> None:
        """Begin or end to follow allocations, which makes calls slow."""


class Cpu(Device):
    """Numpy arrays and the fast core, in this thread."""

    faults = True

    def __init__(self) -> None:
        from hvdcompress.ops import fast

        self.ops = fast

    def array(self, x: Any) -> Array:
        return x

    def fetch(self, x: Array) -> Any:
        return x

    def empty(self, n: int) -> Array:
        return np.full(n, 0.0, np.float32)

    def copy(self, to: Array, x: Array) -> None:
        np.copyto(to, x)

    def combine(self, weights: Any, rows: Array, out: Array) -> None:
        np.matmul(weights, rows, out=out)

    def timed(self, call: Callable[..., Any], *arguments: Any) -> tuple[Any, Cost]:
        faults = resource.getrusage(WHOSE).ru_minflt
        began = time.thread_time()
        result = call(*arguments)
        seconds = time.thread_time() - began
        return result, Cost(seconds, resource.getrusage(WHOSE).ru_minflt - faults)

    def traced(self, call: Callable[..., Any], *arguments: Any) -> tuple[Any, Cost]:
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        result = call(*arguments)
        _, most = tracemalloc.get_traced_memory()
        return result, Cost(fresh=most - before)

    def tracing(self, on: bool) -> None:
        if "hvdcompress.ops.pool" in sys.modules:  # what it keeps shall count
            sys.modules["hvdcompress.ops.pool"].clear()
        (tracemalloc.start if on else tracemalloc.stop)()

    def __str__(self) -> str:
        return f"{machine()}; one thread"


class Tensors(Device):
    """PyTorch's tensors, and the array ops on them. On the CPU it is of use in tests alone.

    Args:
        where: the tensors' device.
        ops: the array ops; None: PyTorch's own.
    """

    def __init__(self, where: str, ops: Ops | None = None):
        import torch

        import hvdcompress.ops.torch as general

        self.ops: Any = ops or general
        self.torch, self.where = torch, torch.device(where)

    def array(self, x: Any) -> Array:
        return self.torch.from_numpy(np.ascontiguousarray(x)).to(self.where)

    def fetch(self, x: Array) -> Any:
        return x.cpu().numpy()

    def empty(self, n: int) -> Array:
        return self.torch.zeros(n, dtype=self.torch.float32, device=self.where)

    def copy(self, to: Array, x: Array) -> None:
        to.copy_(x)

    def combine(self, weights: Any, rows: Array, out: Array) -> None:
        self.torch.mv(rows.T, self.array(weights), out=out)

    def timed(self, call: Callable[..., Any], *arguments: Any) -> tuple[Any, Cost]:
        began = time.thread_time()
        result = call(*arguments)
        return result, Cost(time.thread_time() - began)

    def traced(self, call: Callable[..., Any], *arguments: Any) -> tuple[Any, Cost]:
        return call(*arguments), Cost()

    def tracing(self, on: bool) -> None:
        pass  # nothing is slower for it


class Cuda(Tensors):
    """A GPU of NVIDIA's.

    Raises:
        ValueError: PyTorch is not installed, or finds none.
    """

    def __init__(self) -> None:
        try:
            import torch
        except ImportError:
            raise ValueError("--device cuda needs PyTorch, which is not installed (the extra torch)") from None
        if not torch.cuda.is_available():
            built = "is built without CUDA" if torch.version.cuda is None else "finds no GPU"
            raise ValueError(f"--device cuda: this machine's PyTorch {torch.__version__} {built}; use --device cpu")
        from hvdcompress.ops import cuda

        super().__init__("cuda", cuda)

    def timed(self, call: Callable[..., Any], *arguments: Any) -> tuple[Any, Cost]:
        cuda = self.torch.cuda
        first, last = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        cuda.synchronize()
        first.record()
        result = call(*arguments)
        last.record()
        last.synchronize()
        return result, Cost(first.elapsed_time(last) / 1e3)

    def traced(self, call: Callable[..., Any], *arguments: Any) -> tuple[Any, Cost]:
        cuda = self.torch.cuda
        cuda.reset_peak_memory_stats()
        before = cuda.memory_allocated()
        result = call(*arguments)
        return result, Cost(fresh=cuda.max_memory_allocated() - before)

    def __str__(self) -> str:
        return f"{self.torch.cuda.get_device_name()}; PyTorch {self.torch.__version__}; host: {machine()}"


DEVICES: dict[str, Callable[[], Device]] = {"cpu": Cpu, "cuda": Cuda}


def device(name: str) -> Device:
    """The device of that name in :data:`DEVICES`.

    Raises:
        ValueError: there is no such device, or this machine has none.
    """
    if name not in DEVICES:
        raise ValueError(f"unknown device {name!r}; known: {', '.join(DEVICES)}")
    return DEVICES[name]()


def machine() -> str:
    """Processor and versions."""
    cpu = platform.processor() or platform.machine()
    if (info := Path("/proc/cpuinfo")).exists():
        models = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        cpu = models[0] if models else cpu
    try:
        import numba

        compiler = f"numba {numba.__version__}"
    except ImportError:
        compiler = "no numba"
    return f"{cpu}; Python {platform.python_version()}, numpy {np.__version__}, {compiler}"
