"""The ranks that a program was started with: Horovod's or torch.distributed's, behind one small face."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from experiments.cluster.started import started
from experiments.training.torch_ranks import Ranks
from hvdcompress.plan import Plan

__all__ = ["Fabric", "Gloo", "Horovod", "join", "launched"]


def launched() -> str | None:
    """By what this process finds other ranks: "Horovod", "DDP", or None if it is alone."""
    place = started()
    return place.driver if place and place.world_size > 1 else None


class Fabric(ABC):
    """The ranks, and what they can do together."""

    driver: str
    rank: int
    world_size: int

    @abstractmethod
    def all_reduce(self, arrays: list[torch.Tensor]) -> Any:
        """Start all-reduces, all at once, in place; returns what :meth:`wait` takes."""

    @abstractmethod
    def wait(self, handle: Any) -> None:
        """Wait until all-reduces have ended."""

    @abstractmethod
    def all_gather(self, array: torch.Tensor) -> None:
        """Gather everyone's array."""

    @abstractmethod
    def share(self, value: Any) -> list[Any]:
        """Everyone's value, by rank."""

    @abstractmethod
    def wrap(self, model: torch.nn.Module, plan: Plan | None, optimizer: torch.optim.Optimizer) -> Any:
        """A model that is trained by all ranks; without a plan dense, and without anything of ours.

        Returns:
            (module to call, optimizer to step, compressor or None).
        """

    def meet(self) -> None:
        """Return when all ranks have called it."""
        self.sums(0.0)

    def sums(self, *values: float) -> list[float]:
        """Return the sums of float32 values over all ranks, when all ranks have called it."""
        array = torch.tensor(values)
        self.wait(self.all_reduce([array]))
        return array.tolist()


class Horovod(Fabric):
    """Ranks under horovodrun or mpirun."""

    driver = "Horovod"

    def __init__(self) -> None:
        import horovod.torch as hvd

        hvd.init()
        self.hvd, self.rank, self.world_size = hvd, hvd.rank(), hvd.size()

    def all_reduce(self, arrays: list[torch.Tensor]) -> Any:
        """Start them in place."""
        names = [f"advise.{number}.{len(array)}" for number, array in enumerate(arrays)]
        return [
            self.hvd.allreduce_async_(array, name=name, op=self.hvd.Sum)
            for name, array in zip(names, arrays, strict=True)
        ]

    def wait(self, handle: Any) -> None:
        """Wait for all of them."""
        for one in handle:
            self.hvd.synchronize(one)

    def all_gather(self, array: torch.Tensor) -> None:
        """Gather everyone's array."""
        self.hvd.allgather(array, name="advise.gather")

    def share(self, value: Any) -> list[Any]:
        """Everyone's value, by rank."""
        return self.hvd.allgather_object(value, name="advise.share")

    def wrap(self, model: torch.nn.Module, plan: Plan | None, optimizer: torch.optim.Optimizer) -> Any:
        """The model, the stock optimizer around its own, and the Compressor inside it."""
        from hvdcompress.horovod.torch import Compressor

        names = list(model.named_parameters())
        compressor = Compressor(plan, names) if plan else None
        given = {"compression": compressor} if compressor else {}
        return model, self.hvd.DistributedOptimizer(optimizer, named_parameters=names, **given), compressor


class Gloo(Fabric):
    """Ranks under torchrun."""

    driver = "DDP"

    def __init__(self) -> None:
        import torch.distributed as dist

        if not dist.is_initialized():
            Ranks.init()
        self.dist, self.rank, self.world_size = dist, dist.get_rank(), dist.get_world_size()

    def all_reduce(self, arrays: list[torch.Tensor]) -> Any:
        """Start them in place."""
        return [self.dist.all_reduce(array, async_op=True) for array in arrays]

    def wait(self, handle: Any) -> None:
        """Wait for all of them."""
        for one in handle:
            one.wait()

    def all_gather(self, array: torch.Tensor) -> None:
        """Gather everyone's array."""
        self.dist.all_gather([torch.empty_like(array) for _ in range(self.world_size)], array)

    def share(self, value: Any) -> list[Any]:
        """Everyone's value, by rank."""
        return Ranks.allgather_object(value, name="advise.share")

    def wrap(self, model: torch.nn.Module, plan: Plan | None, optimizer: torch.optim.Optimizer) -> Any:
        """DDP around the model, the optimizer itself, and the Compressor behind DDP's hook."""
        from hvdcompress import ddp

        module = torch.nn.parallel.DistributedDataParallel(model, init_sync=False)
        return module, optimizer, ddp.attach(module, plan) if plan else None


def join() -> Fabric:
    """Join the ranks that this process was started with.

    Raises:
        ValueError: it was started alone.
    """
    found = launched()
    if found is None:
        raise ValueError("this process is alone: start it with horovodrun, mpirun or torchrun")
    return Horovod() if found == "Horovod" else Gloo()
