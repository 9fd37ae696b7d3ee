"""A device that is none: tensors in host memory that torch's rules for CUDA tensors hold for, and a count of waits.

``with Device() as device`` makes tensors for ``device="cuda"`` of the class :class:`Elsewhere`. They work as others do,
but an operation that would take one from host memory together with them is an error, as with CUDA; and whatever makes
the host wait for a GPU is counted by name in ``device.waits``. What waits, by torch's sources and documentation:

- numbers that come to the host: ``tolist``, ``item``, ``cpu``, ``bool``;
- results whose size depends on numbers: ``nonzero``, ``unique``, ``bincount``, an index of booleans;
- a copy from host memory (``upload``), unless it is ``non_blocking``.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CUDA = torch.device("cuda", 0)

NUMBERS = {"tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "equal"}
SIZES = {"nonzero", "argwhere", "unique", "_unique2", "unique_consecutive", "masked_select", "bincount"}


class Elsewhere(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    @property
    def device(self) -> torch.device:
        return CUDA

    @property
    def is_cuda(self) -> bool:
        return True


def each(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to all that a nest of lists, tuples and dicts holds."""
    if isinstance(value, dict):
        return {key: each(function, one) for key, one in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(each(function, one) for one in value))
    if isinstance(value, list | tuple):
        return type(value)(each(function, one) for one in value)
    return function(value)


def plain(value: Any) -> Any:
    """The same memory as an ordinary tensor."""
    return value.as_subclass(torch.Tensor) if isinstance(value, Elsewhere) else value


def there(value: Any) -> Any:
    """The same memory as a tensor of the device."""
    ordinary = isinstance(value, torch.Tensor) and not isinstance(value, Elsewhere)
    return value.as_subclass(Elsewhere) if ordinary else value


def is_device(value: Any) -> bool:
    return isinstance(value, torch.device) or (isinstance(value, str) and value in ("cpu", "cuda"))


def on_host(value: Any) -> Any:
    """An argument as it is for the host's memory."""
    return "cpu" if is_device(value) else plain(value)


class Device(TorchFunctionMode):
    """See the module's text.

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
    """Stands for ``horovod.torch`` among ranks that are threads: what is started is done once all have started it.

    Attributes:
        mixed: names of the collectives that ranks started with tensors on unlike devices, which Horovod refuses.
    """

    Sum, Average, Max = "sum", "average", "max"

    def __init__(self, world_size: int):
        self.world_size, self.mixed, self.came, self.done = world_size, [], {}, {}
        self.turns: Counter[tuple[str, int]] = Counter()  # names are used again in every step
        self.lock, self.rank = threading.Condition(), threading.local()
        self.handles: dict[int, tuple[str, int]] = {}
        self.global_process_set = self
        self.process_set_id = 0

    # -- a process set, of which each thread is a rank
    def size(self) -> int:
        return self.world_size

    # -- collectives
    def is_initialized(self) -> bool:
        return True

    def _start(self, kind: str, tensor: Any, name: str, detail: Any = None) -> int:
        with self.lock:
            self.turns[name, self.rank.number] += 1
            name = f"{name} #{self.turns[name, self.rank.number]}"
            ranks = self.came.setdefault(name, {})
            ranks[self.rank.number] = (kind, tensor, detail)
            if len({isinstance(given, Elsewhere) for _, given, _ in ranks.values()}) > 1:
                self.mixed.append(name)
            if len(ranks) == self.world_size:  # at once: a rank whose own result is there may write over what it gave
                self.done[name] = self._carry_out(
                    *([ranks[rank][at] for rank in range(self.world_size)] for at in range(3))
                )
            self.lock.notify_all()
            self.handles[handle := len(self.handles)] = (name, self.rank.number)
            return handle

    def allreduce_async(self, tensor: Any, op: Any = "average", name: str = "", process_set: Any = None) -> int:
        return self._start("reduce", tensor, name, op)

    allreduce_async_ = allreduce_async

    def allgather_async(self, tensor: Any, name: str = "", process_set: Any = None) -> int:
        return self._start("gather", tensor, name)

    def alltoall_async(self, tensor: Any, splits: Any = None, name: str = "", process_set: Any = None) -> int:
        return self._start("all to all", tensor, name, splits)

    def poll(self, handle: int) -> bool:
        return self.handles[handle][0] in self.done

    def synchronize(self, handle: int) -> Any:
        name, rank = self.handles[handle]
        with self.lock:
            assert self.lock.wait_for(lambda: name in self.done, 20), f"{name}: ranks are missing"
            return self.done[name][rank]

    def _carry_out(self, kinds: list[str], given: list[Any], details: list[Any]) -> list[Any]:
        """Every rank's result."""
        with torch._C.DisableTorchFunction():
            where = Elsewhere if isinstance(given[0], Elsewhere) else torch.Tensor
            given = [plain(one) for one in given]
            if kinds[0] == "all to all":
                pieces = [one.split(splits.tolist()) for one, splits in zip(given, details, strict=True)]
                results = [torch.cat([piece[rank] for piece in pieces]) for rank in range(self.world_size)]
            elif kinds[0] == "gather":
                results = [torch.cat(given) for _ in given]
            else:
                total = torch.stack(given).amax(0) if details[0] == "max" else sum(given[1:], given[0])
                results = [total / self.world_size if details[0] == "average" else total.clone() for _ in given]
            return [result.as_subclass(where) for result in results]
