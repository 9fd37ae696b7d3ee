"""The ranks that the user's launcher started, under Horovod or DDP, and the contenders that they train with."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from hvdcompress import ddp
from hvdcompress.launchers import started
from hvdcompress.plan import Plan, load_plan, plan_of, settings_of

ALONE, DENSE = "no exchange", "dense"


class UserError(ValueError):
    """A function of the user failed on this rank; the message names the option."""


class AdviseError(ValueError):
    """A failure that all ranks know about: all of them raise it."""


@dataclass(frozen=True)
class Contender:
    """One way to exchange gradients, with the settings as the user wrote them; ``plan`` is None if it is not ours."""

    label: str
    plan: Plan | None = None
    settings: dict[str, Any] = field(default_factory=dict)


def contenders(words: str) -> list[Contender]:
    """Return the contenders that ``--methods`` names, such as "fp16, topk density=0.01, plan.yaml".

    The fallback of "auto" is off while it is measured: ``advise`` makes the same comparison, with more steps.
    """
    found = []
    for word in filter(None, (word.strip() for word in words.split(","))):
        id, *pairs = word.split()
        is_file = id.endswith((".yaml", ".yml"))
        settings = load_plan(word).to_dict() if is_file else {"method": id, **settings_of(pairs)}
        found.append(Contender(word, plan_of({**settings, "fallback": False}), settings))
    return found


@dataclass(frozen=True)
class Training:
    """A model that all ranks train; ``compressor`` is None for contenders that are not ours."""

    module: torch.nn.Module
    optimizer: torch.optim.Optimizer
    compressor: Any = None

    def step(self, loss_of: Any, batch: Any) -> None:
        """Take a step, and wait until a GPU has finished it."""
        self.optimizer.zero_grad()
        loss = loss_of(self.module, batch)
        loss.backward()
        self.optimizer.step()
        if loss.is_cuda:
            torch.cuda.synchronize(loss.device)

    def close(self) -> None:
        """Free the Compressor's memory and process group."""
        if self.compressor:
            self.compressor.release()
            self.compressor.close()


class Ranks:
    """All ranks, and the operations that they do together."""

    def __init__(self) -> None:
        place = started()
        if place is None or place.world_size < 2:
            raise ValueError(
                "advise measures how several ranks exchange gradients, but this process is alone. Start it like your "
                "training, for example:\n  torchrun --nproc-per-node 2 -m hvdcompress advise --model …\n"
                "  horovodrun -np 2 hvdcompress advise --model …"
            )
        self.driver, self.rank, self.world_size = place.driver, place.rank, place.world_size
        local_rank, has_gpu = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.is_available()
        if self.driver == "Horovod":
            import horovod.torch as hvd

            hvd.init()
            self._hvd, self.rank, self.world_size, local_rank = hvd, hvd.rank(), hvd.size(), hvd.local_rank()
        if has_gpu:
            torch.cuda.set_device(local_rank % torch.cuda.device_count())
        if self.driver == "DDP":
            dist.init_process_group("cpu:gloo,cuda:nccl" if has_gpu else "gloo")

    def leave(self) -> None:
        """Leave the other ranks."""
        self._hvd.shutdown() if self.driver == "Horovod" else dist.destroy_process_group()

    def share(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank, when all ranks have called it."""
        if self.driver == "Horovod":
            return self._hvd.allgather_object(value, name="advise.share")
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, value)
        return found

    def wrap(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, contender: Contender) -> Training:
        """Prepare a model and its optimizer for training on all ranks, with rank 0's weights."""
        if contender.label == ALONE:
            return Training(model, optimizer)
        if self.driver == "DDP":
            module = DistributedDataParallel(model)
            if contender.plan:
                return Training(module, optimizer, ddp.attach(module, contender.plan))
            if contender.label != DENSE:
                module.register_comm_hook(None, fp16_compress_hook)
            return Training(module, optimizer)
        from hvdcompress.horovod.torch import DistributedOptimizer

        self._hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        named, compression = list(model.named_parameters()), self._hvd.Compression
        if contender.plan:
            wrapped: Any = DistributedOptimizer(optimizer, named, contender.plan)
            return Training(model, wrapped, wrapped.compressor)
        stock = compression.none if contender.label == DENSE else compression.fp16
        return Training(model, self._hvd.DistributedOptimizer(optimizer, named, compression=stock))

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Context manager around code without collectives: an error on one rank is raised on all."""
        failure = ""
        cause = None
        try:
            yield
        except Exception as error:
            cause = error
            failure = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        failures = [f"{text} (on rank {rank})" for rank, text in enumerate(self.share(failure)) if text]
        if failures:
            raise AdviseError(failures[0]) from cause
