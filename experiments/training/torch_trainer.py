"""PyTorch trainings: the same net and SGD with the compression in Horovod's optimizer, or in DDP."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hvdcompress
from experiments.training import models_torch
from experiments.training.experiment import Run
from experiments.training.tasks import Batch, Bytes, Images, net_of

__all__ = ["DdpRanks", "DdpTrainer", "HorovodTrainer"]


class TorchTrainer:
    """The net of a run and its SGD. Subclasses add the compression."""

    compressor: Any

    def __init__(self, run: Run, data: Images | Bytes):
        torch.manual_seed(run.seed)  # same initial parameters for every method, and on every rank
        task = run.task
        # clipped by the Compressor, as what the optimizer is handed is larger where momentum is cancelled
        self.plan = hvdcompress.load({"seed": run.seed, **run.method.settings, "clip_norm": task.clip_norm})
        self.model = models_torch.build(net_of(task.task, task.net), data)
        self.forward: torch.nn.Module = self.model
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=0.0, momentum=task.momentum, weight_decay=task.weight_decay
        )  # each step sets its learning rate

    def parameters(self) -> dict[str, np.ndarray]:
        """Return all parameters by name."""
        return {name: parameter.detach().numpy() for name, parameter in self.model.named_parameters()}

    def step(self, batch: Batch, rate: float) -> float:
        """Forward, backward, exchange, update; return this rank's loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad()
        loss = models_torch.loss_of(self.forward, batch)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def compute(self, batch: Batch) -> None:
        """Forward and backward, without hooks: nothing is exchanged."""
        torch.autograd.grad(models_torch.loss_of(self.model, batch), list(self.model.parameters()))

    def evaluate(self, batches: Iterable[Batch]) -> list[float]:
        """Return sums over batches: negative log-likelihood, correct, all."""
        return models_torch.held_out_sums(self.model, batches)


class HorovodTrainer(TorchTrainer):
    """The net with the stock Horovod optimizer around SGD, and the compression inside it."""

    def __init__(self, run: Run, data: Images | Bytes):
        import horovod.torch as hvd

        from hvdcompress.horovod.torch import Compressor

        super().__init__(run, data)
        names = list(self.model.named_parameters())
        self.compressor = Compressor(self.plan, names)
        self.optimizer = hvd.DistributedOptimizer(self.optimizer, named_parameters=names, compression=self.compressor)
        self.compressor.use_optimizer(self.optimizer)  # before its first step, as gradients are asked for first here
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)


class DdpTrainer(TorchTrainer):
    """The net in DDP, which hands its buckets to the compression, and SGD."""

    def __init__(self, run: Run, data: Images | Bytes):
        from hvdcompress import ddp

        super().__init__(run, data)
        self.forward = DistributedDataParallel(self.model, broadcast_buffers=False)  # as under Horovod
        self.compressor = ddp.attach(self.forward, self.plan, optimizer=self.optimizer)


class DdpRanks:
    """The ranks that torchrun started, asked as Horovod's are."""

    rank = staticmethod(dist.get_rank)
    size = staticmethod(dist.get_world_size)
    shutdown = staticmethod(dist.destroy_process_group)

    @staticmethod
    def init(backend: str = "gloo", timeout: float = 1800.0) -> None:
        """Join the other ranks; a collective may take ``timeout`` seconds."""
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))

    @staticmethod
    def allgather_object(value: Any, name: str = "") -> list[Any]:
        """Return every rank's value, in rank order."""
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, value)
        return found
