"""One contender in one process: the net, its optimizer, and what exchanges its gradients."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from experiments.momentum import tasks
from experiments.momentum.contenders import Contender
from experiments.momentum.tasks import Task
from experiments.to_accuracy.contenders import FP16, NOOP, POWERSGD, baseline_of
from experiments.training.models_torch import loss_of
from experiments.training.tasks import Batch
from hvdcompress import ddp
from hvdcompress._torch.compressor import TensorCompressor

ONE_BUCKET = 1 << 16  #: MB; over gloo, DDP's PowerSGD hook aborts with more than one bucket


class Trainer:
    """Base class: the steps that all drivers have in common.

    Args:
        task: the net, its data and its optimizer.
        contender: what exchanges gradients.
        device: "cpu" or "cuda", where the net computes.
    """

    def __init__(self, task: Task, contender: Contender, device: str = "cpu"):
        self.task = task
        self.contender = contender
        self.device = device
        self.baseline = baseline_of(contender.name)
        self.compressor: TensorCompressor | None = None
        self.net: nn.Module = tasks.NETS[task.net]().to(device)
        self.model: nn.Module = self.net
        self.optimizer = task.make_optimizer(
            self.net.parameters(), task.rate * contender.lr, contender.momentum_on(task)
        )

    def set_rate(self, step: int, steps: int) -> None:
        """Set the learning rate of a step, from 0, of a training of ``steps``."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.task.rate_at(step, steps) * self.contender.lr

    @property
    def compares(self) -> bool:
        """Whether the contender compares steps with and without compression, and has not decided yet."""
        return self.compressor is not None and self.compressor.local.fallback.compares

    def step(self, batch: Batch) -> None:
        """Take one training step."""
        self.optimizer.zero_grad()
        loss_of(self.model, batch).backward()
        self.update()

    def update(self) -> None:
        """Update the net. Clip the averaged gradient before, unless DDP's Compressor has done so in the exchange."""
        if self.task.clip is not None and not isinstance(self.compressor, ddp.Compressor):
            nn.utils.clip_grad_norm_(self.net.parameters(), self.task.clip)
        self.optimizer.step()

    def close(self) -> None:
        """Free what the contender holds, on all ranks."""


class DdpTrainer(Trainer):
    """The net in DDP, with a contender's communication hook."""

    def __init__(self, task: Task, contender: Contender, device: str = "cpu"):
        super().__init__(task, contender, device)
        baseline = self.baseline or ""
        powersgd = baseline.startswith(POWERSGD)
        model = DistributedDataParallel(
            self.net, broadcast_buffers=False, **({"bucket_cap_mb": ONE_BUCKET} if powersgd and device == "cpu" else {})
        )
        self.model = model
        if self.baseline is None:
            plan = {**contender.plan(task), **({"clip_norm": task.clip} if task.clip is not None else {})}
            self.compressor = ddp.attach(model, plan, optimizer=self.optimizer)
        elif powersgd:
            rank = int(baseline.removeprefix(POWERSGD))
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif baseline == FP16:
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif baseline == NOOP:
            model.register_comm_hook(None, debugging_hooks.noop_hook)

    def close(self) -> None:
        """Free the Compressor's process group when all ranks have come here."""
        dist.barrier()
        if isinstance(self.compressor, ddp.Compressor):
            self.compressor.close()


class HorovodTrainer(Trainer):
    """The net with Horovod's optimizer."""

    def __init__(self, task: Task, contender: Contender, device: str = "cpu"):
        import horovod.torch as hvd

        from hvdcompress.horovod.torch import Compressor

        super().__init__(task, contender, device)
        named = list(self.net.named_parameters())
        compression: Any = hvd.Compression.fp16 if self.baseline == FP16 else hvd.Compression.none
        if self.baseline is None:
            compression = self.compressor = Compressor(contender.plan(task), named)
        else:  # Horovod caches tensors by name, and a process trains several contenders
            named = [(f"{contender.name}.{name}", parameter) for name, parameter in named]
        self.optimizer = hvd.DistributedOptimizer(self.optimizer, named_parameters=named, compression=compression)
        hvd.broadcast_parameters(self.net.state_dict(), root_rank=0)

    def update(self) -> None:
        """Wait for the exchange, clip and update."""
        self.optimizer.synchronize()
        with self.optimizer.skip_synchronize():
            super().update()


TRAINERS: dict[str, type[Trainer]] = {"ddp": DdpTrainer, "horovod": HorovodTrainer}
