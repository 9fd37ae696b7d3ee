"""A simulated GPU: tensors in host memory that follow torch's rules for CUDA tensors, and a count of synchronizations.

``with Device() as device`` makes tensors for ``device="cuda"`` of the class :class:`Elsewhere`. An operation on one of
them and on a tensor in host memory is an error, as with CUDA. ``device.waits`` counts, by name, the operations for
which the host waits for the GPU, by torch's sources and documentation:

- numbers that come to the host: ``tolist``, ``item``, ``cpu``, ``bool``;
- results whose size depends on numbers: ``nonzero``, ``unique``, ``bincount``, an index of booleans;
- a copy from host memory (``upload``), unless it is ``non_blocking``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CUDA = torch.device("cuda", 0)

NUMBERS = {"tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "equal"}
SIZES = {"nonzero", "argwhere", "unique", "_unique2", "unique_consecutive", "masked_select", "bincount"}


class Elsewhere(torch.Tensor):
    """A tensor whose device is a GPU."""

    @property
    def device(self) -> torch.device:
        return CUDA

    @property
    def is_cuda(self) -> bool:
        return True


def each(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to all items of nested lists, tuples and dicts."""
    if isinstance(value, dict):
        return {key: each(function, one) for key, one in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(each(function, one) for one in value))
    if isinstance(value, list | tuple):
        return type(value)(each(function, one) for one in value)
    return function(value)


def plain(value: Any) -> Any:
    """Return the same memory as an ordinary tensor."""
    return value.as_subclass(torch.Tensor) if isinstance(value, Elsewhere) else value


def there(value: Any) -> Any:
    """Return the same memory as a tensor of the device."""
    ordinary = isinstance(value, torch.Tensor) and not isinstance(value, Elsewhere)
    return value.as_subclass(Elsewhere) if ordinary else value


def is_device(value: Any) -> bool:
    return isinstance(value, torch.device) or (isinstance(value, str) and value in ("cpu", "cuda"))


def on_host(value: Any) -> Any:
    """Return an argument for the same operation in host memory."""
    return "cpu" if is_device(value) else plain(value)


class Device(TorchFunctionMode):
    """Context manager that simulates the GPU, as the module's text says.

    Attributes:
        waits: how often the host has waited, by reason.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name, found = dict(kwargs or {}), func.__name__, []
        each(found.append, [args, kwargs])
        tensors = [one for one in found if isinstance(one, torch.Tensor)]
        devices = [torch.device(one).type for one in found if is_device(one)]
        here = [one for one in tensors if not isinstance(one, Elsewhere)]
        with torch._C.DisableTorchFunctionSubclass():
            if name == "__get__":
                return func(*args, **kwargs) if here else there(func(*args, **kwargs))
            moves = name in ("to", "copy_") or (name == "tensor" and not tensors)
            if len(here) < len(tensors) and not moves and any(one.dim() for one in here):
                raise RuntimeError(f"{name}: expected all tensors to be on the same device, cuda:0 and cpu are here")
            comes, goes = "cuda" in devices, "cpu" in devices or name in ("cpu", "numpy")
            if moves and ((comes and len(here) == len(tensors)) or 0 < len(here) < len(tensors)):
                self.waits["upload"] += not kwargs.get("non_blocking")
            elif len(here) < len(tensors):
                self._note(name, args, tensors, goes)
            args, kwargs = each(on_host, args), each(on_host, kwargs)
            result = func(*args, **kwargs)
            return each(there, result) if comes or (len(here) < len(tensors) and not goes) else result

    def _note(self, name: str, args: Any, tensors: Sequence[Any], goes: bool) -> None:
        """Count what waits among operations on tensors of the device."""
        if name in NUMBERS or name in SIZES or (name == "where" and len(args) == 1):
            self.waits[name] += 1
        elif goes:
            self.waits["cpu"] += 1
        elif name in ("__getitem__", "__setitem__") and any(one.dtype == torch.bool for one in tensors[1:2]):
            self.waits["index of booleans"] += name == "__getitem__" or len(tensors) > 2
        elif name == "repeat_interleave" and len(tensors) > 1:
            self.waits[name] += 1


class Horovod:
    """``horovod.torch`` with one rank: the result of a collective is a copy of its input.

    Attributes:
        step: the number of the step, which the test sets.
        started: each collective's step and name, and the class of its input: :class:`Elsewhere` on the device.
    """

    Sum, Average, Max = "sum", "average", "max"
    process_set_id = 0

    def __init__(self) -> None:
        self.step = 0
        self.started: list[tuple[int, str, type]] = []
        self.results: list[torch.Tensor] = []
        self.global_process_set = self

    def is_initialized(self) -> bool:
        return True

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1

    def _start(self, tensor: Any, *_: Any, name: str, **__: Any) -> int:
        self.started.append((self.step, name, type(tensor)))
        with torch._C.DisableTorchFunction():
            self.results.append(plain(tensor).clone().as_subclass(type(tensor)))
        return len(self.results) - 1

    allreduce_async = allreduce_async_ = allgather_async = alltoall_async = _start

    def poll(self, handle: int) -> bool:
        return True

    def synchronize(self, handle: int) -> Any:
        return self.results[handle]
