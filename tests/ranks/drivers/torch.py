"""Horovod for PyTorch: the stock ``hvd.DistributedOptimizer``; a backward pass makes the gradients."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch import optimizer as stock

from hvdcompress.horovod.torch import Compressor, PeerError
from hvdcompress.plan import BY_NAME
from tests.ranks.drivers.base import Arrays, Counter, Driver, Handle, Shapes, replaced, step_of

PAIR = hvd.ProcessSet([1, 2])  #: a process set, where there are so many ranks; for the cases
_numbers = itertools.count()


def backward(params: dict, grads: Arrays, names: list[str] | None = None) -> None:
    """A backward pass that gives each parameter exactly these gradients, hooks firing in the order of ``names``."""
    loss = torch.zeros((), dtype=torch.float64)
    for name in names or list(params):
        loss = loss + (params[name].double() * torch.from_numpy(grads[name]).double()).sum()
    loss.backward()


class TorchHandle(Handle):
    """``passes``: backward passes in a step, each of which gives an equal part of the gradients."""

    def __init__(
        self,
        method: Any,
        settings: dict,
        shapes: Shapes,
        dtype: str,
        op: str,
        loss_scale: Any,
        process_set: hvd.ProcessSet = hvd.global_process_set,
        passes: int = 1,
    ):
        self.shapes, self.passes = shapes, passes
        kind = getattr(torch, dtype)
        self.params = {name: torch.nn.Parameter(torch.zeros(shape, dtype=kind)) for name, shape in shapes.items()}
        given = {"loss_scale": loss_scale, "process_set": process_set, **settings}
        self.compressor = Compressor(method, self.params.items(), **given)
        number = next(_numbers)  # a step that fails leaves stock all-reduces of its names behind
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self.params.values(), lr=1.0),
            named_parameters=[(f"{number}.{name}", parameter) for name, parameter in self.params.items()],
            compression=self.compressor,
            op=hvd.Sum if op == "sum" else hvd.Average,
            process_set=process_set,
            backward_passes_per_step=passes,
        )

    def reduce(self, gradients: Arrays) -> Arrays:
        for parameter in self.params.values():
            parameter.grad = None
        for _ in range(self.passes):
            part = {name: array / self.passes for name, array in gradients.items()} if self.passes > 1 else gradients
            backward(self.params, part, list(gradients))
        self.optimizer.synchronize()
        out = {}
        for name, parameter in self.params.items():
            grad = parameter.grad.detach().contiguous()
            assert grad.dtype == parameter.dtype
            out[name] = (grad.float() if grad.dtype == torch.bfloat16 else grad).numpy().copy()
        return out

    def train(self, gradients: Arrays, momentum: float) -> Arrays:
        self.reduce(gradients)
        with self.optimizer.skip_synchronize():
            return step_of(self.optimizer, self.params, momentum)

    def change(self, name: str) -> None:
        self.params[name].data.view(-1)[-1] = 1e-45

    def overhead(self, steps: int) -> dict[str, int]:
        """A probe with each gradient that Horovod does not reduce itself, and a status in each step; with two levels,
        it reduces none, there are two statuses, and ranks compare their nodes at first."""
        probes = {}
        nodes = self.compressor.rank_state.nodes
        statuses = 2 if nodes else 1
        for bucket in self.compressor.buckets.values():
            passing = nodes is None and bucket.spec.dtype == "float32" and len(bucket.members) == 1
            methods = [bucket.program.at(step) for step in range(1, steps)]
            passed = sum(passing and method.identity and method.feedback == "none" for method in methods)
            probes |= {member.name: (steps - passed) * TorchDriver.probe for member in bucket.members}
        return {
            **probes,
            "status": 64 * statuses * steps,
            "watchdog": self.sent().get("watchdog", 0),
            "plan": self.sent().get("plan", 0),
        }


class TorchDriver(Driver):
    name = "torch"
    grouping = BY_NAME
    error = PeerError
    probe = 8
    passes_on = ("none",)

    def __init__(self, folder: Path):
        torch.set_num_threads(1)
        world_size = int(os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("HOROVOD_SIZE") or 1)
        hvd.init(process_sets=[PAIR] if world_size > 2 else None)
        self.rank, self.world_size, self.folder = hvd.rank(), hvd.size(), folder

    def make(self, method, settings, shapes, *, dtype="float32", op="average", loss_scale=1.0) -> TorchHandle:
        return TorchHandle(method, self.placed(settings, method), shapes, dtype, op, loss_scale)

    def gather(self, value: Any) -> list[Any]:
        return hvd.allgather_object(value)

    @contextmanager
    def counting(self) -> Iterator[Counter]:
        counter = Counter()

        def counted(function: Any) -> Any:
            def call(tensor: torch.Tensor, *rest: Any, **more: Any) -> Any:
                counter.num_bytes += tensor.nbytes
                return function(tensor, *rest, **more)

            return call

        places: list[tuple[Any, str]] = [
            (hvd, name)
            for name in ("allreduce_async", "allreduce_async_", "allgather_async", "alltoall_async", "allgather")
        ]
        with replaced([*places, (stock, "allreduce_async_")], counted):
            yield counter


DRIVER = TorchDriver
