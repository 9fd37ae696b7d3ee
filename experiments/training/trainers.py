"""A rank's part in a training: the net of a task, its optimizer, and what exchanges the gradients."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from experiments.attach import Attached, How, over_ddp, over_horovod
from experiments.training import models_torch
from experiments.training.experiment import Task
from experiments.training.tasks import Batch, data_of, net_of
from hvdcompress import ddp


class Trainer:
    """The net of a task and its optimizer, in Horovod's optimizer or in DDP.

    Args:
        driver: "ddp", or "horovod" or "gloo" for Horovod.
        task: the net, its data and its optimizer.
        how: what exchanges gradients.
        seed: of the initial parameters, which are the same for every method and on every rank.
        device: "cpu" or "cuda", where the net computes.
        prefix: of the names under which Horovod sums the gradients of a baseline.
        local: arguments of LocalSteps, whose method is then ``how``; None to exchange gradients in every step. Only DDP
            takes local steps.
    """

    def __init__(
        self,
        driver: str,
        task: Task,
        how: How,
        seed: int,
        device: str = "cpu",
        prefix: str = "",
        local: Mapping[str, Any] | None = None,
    ):
        torch.manual_seed(seed)
        self.driver, self.task = driver, task
        self.net = models_torch.build(net_of(task.task, task.net), data_of(task.task)).to(device)
        optimizer = models_torch.optimizer_of(task, self.net)
        self.local: ddp.CountedLocalSteps | None = None
        if local is not None:
            model = DistributedDataParallel(self.net)
            settings = dict(local)
            self.local = ddp.attach(model, how, local_steps=settings.pop("every"), **settings)
            self.attached, self.compressor = Attached(model, optimizer), None
            return
        if not isinstance(how, str):
            prefix = ""
        if driver == "ddp":
            self.attached = over_ddp(self.net, optimizer, how)
        else:
            named = [(prefix + name, parameter) for name, parameter in self.net.named_parameters()]
            self.attached = over_horovod(named, optimizer, how)
        self.compressor = self.attached.compressor

    def parameters(self) -> dict[str, np.ndarray]:
        """Return all parameters by name."""
        return {name: parameter.detach().numpy() for name, parameter in self.net.named_parameters()}

    def step(self, batch: Batch, rate: float) -> float:
        """Forward, backward, exchange, update with this learning rate; return this rank's loss."""
        optimizer = self.attached.optimizer
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        loss = models_torch.loss_of(self.attached.net or self.net, batch)
        loss.backward()
        reduced = nullcontext()
        if self.task.clip_norm is not None:
            if self.driver != "ddp":
                optimizer.synchronize()
                reduced = optimizer.skip_synchronize()
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), self.task.clip_norm)
        with reduced:
            optimizer.step()
        return loss.item()

    def compute(self, batch: Batch) -> float:
        """Return the seconds of forward and backward, without hooks: nothing is exchanged."""
        began = time.perf_counter()
        torch.autograd.grad(models_torch.loss_of(self.net, batch), list(self.net.parameters()))
        return time.perf_counter() - began

    def evaluate(self, batches: Iterable[Batch]) -> list[float]:
        """Return sums over batches: negative log-likelihood, correct, all; of the ranks' mean net with local steps."""
        return models_torch.held_out_sums(self._mean() if self.local else self.net, batches)

    @torch.no_grad()
    def _mean(self) -> torch.nn.Module:
        """Return a net with the mean of all ranks' parameters and buffers."""
        mean = copy.deepcopy(self.net)
        for tensor in mean.state_dict().values():
            if tensor.is_floating_point():
                dist.all_reduce(tensor)
                tensor /= dist.get_world_size()
        return mean

    def close(self) -> None:
        """Free the process group of a Compressor under DDP, when all ranks have come here."""
        if self.local:
            self.local.close()
        if isinstance(self.compressor, ddp.Compressor):
            dist.barrier()
            self.compressor.close()


class DdpRanks:
    """The ranks that torchrun started, asked as Horovod's are."""

    rank = staticmethod(dist.get_rank)
    size = staticmethod(dist.get_world_size)
    shutdown = staticmethod(dist.destroy_process_group)

    @staticmethod
    def allgather_object(value: Any, name: str = "") -> list[Any]:
        """Return every rank's value, in rank order."""
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, value)
        return found


def join(driver: str, device: str = "cpu") -> DdpRanks:
    """Join the other ranks of this launch.

    Args:
        driver: as of :class:`Trainer`.
        device: "cpu", or "cuda" for one GPU that all ranks share; DDP only.

    Returns:
        The ranks: those of DDP, or a module of Horovod, which has the same functions.
    """
    torch.set_num_threads(1)  # one core per rank: threads of several ranks would fight for the same ones
    if driver != "ddp":
        import horovod.torch as hvd

        hvd.init()
        return hvd
    if device == "cuda":
        os.environ["NCCL_HOSTID"] = os.environ["RANK"]  # otherwise NCCL refuses ranks that share a GPU
        torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", timeout=timedelta(minutes=30))
    return DdpRanks()
