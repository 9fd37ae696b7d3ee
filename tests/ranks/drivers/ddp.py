"""PyTorch's DistributedDataParallel; a backward pass makes the gradients.

With ``DEVICE=cuda`` in the environment, gradients are on a GPU and collectives go over NCCL; one GPU is enough.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hvdcompress import ddp
from hvdcompress.ddp import transport
from hvdcompress.plan import IN_ORDER
from tests.ranks.drivers.base import Arrays, Counter, Driver, Handle, Shapes, replaced, step_of

DEVICE = torch.device(os.environ.get("DEVICE", "cpu"))


class Net(torch.nn.Module):
    """Parameters of these shapes, of which a backward pass makes exactly the gradients that are asked for."""

    def __init__(self, shapes: Shapes, dtype: str = "float32"):
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(
                name, torch.nn.Parameter(torch.zeros(shape, dtype=getattr(torch, dtype), device=DEVICE))
            )

    def forward(self, gradients: Arrays) -> torch.Tensor:
        loss = torch.zeros((), dtype=torch.float64, device=DEVICE)
        for name, gradient in gradients.items():
            loss = loss + (getattr(self, name).double() * torch.from_numpy(gradient).to(DEVICE).double()).sum()
        return loss


def reduced(model: torch.nn.Module, gradients: Arrays, passes: int = 1) -> Arrays:
    """What a step's gradients come to; ``passes``: backward passes, each of which gives an equal part of them."""
    model.zero_grad()
    if passes > 1:
        gradients = {name: array / passes for name, array in gradients.items()}
    with model.no_sync():
        for _ in range(passes - 1):
            model(gradients).backward()
    model(gradients).backward()
    out = {}
    for name, parameter in model.module.named_parameters():
        grad = parameter.grad.detach().contiguous().cpu()
        assert grad.dtype == parameter.dtype
        out[name] = (grad.float() if grad.dtype == torch.bfloat16 else grad).numpy().copy()
    return out


class DdpHandle(Handle):
    def __init__(
        self,
        method: Any,
        settings: dict,
        shapes: Shapes,
        dtype: str,
        op: str,
        loss_scale: Any,
        group: Any = None,
        passes: int = 1,
    ):
        assert op == "average"
        self.shapes, self.passes = shapes, passes
        several = {"bucket_cap_mb": 0.004, "process_group": group}  # buckets
        self.model = DistributedDataParallel(Net(shapes, dtype), **several)
        self.sgd = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.compressor = ddp.attach(self.model, method, loss_scale=loss_scale, **settings)

    def reduce(self, gradients: Arrays) -> Arrays:
        return reduced(self.model, gradients, self.passes)

    def train(self, gradients: Arrays, momentum: float) -> Arrays:
        self.reduce(gradients)
        return step_of(self.sgd, dict(self.model.module.named_parameters()), momentum)

    def change(self, name: str) -> None:
        dict(self.model.module.named_parameters())[name].data.view(-1)[-1] = 1e-45

    def overhead(self, steps: int) -> dict[str, int]:
        """A status at the beginning and the end of each step, and the lengths of payloads that are gathered."""
        return {"status": 72 * steps, **self.lengths()}

    def close(self) -> None:
        self.compressor.close()


class DdpDriver(Driver):
    name = "ddp"
    error = ddp.PeerError
    recovers = sums_in_order = True
    on_host = same_products = DEVICE.type == "cpu"
    grouping = IN_ORDER

    def __init__(self, folder: Path):
        torch.set_num_threads(1)
        if DEVICE.type == "cuda":
            torch.cuda.set_device(0)
            os.environ["NCCL_HOSTID"] = os.environ["RANK"]  # else NCCL refuses two ranks on one GPU
        dist.init_process_group("gloo" if DEVICE.type == "cpu" else "cpu:gloo,cuda:nccl", timeout=timedelta(seconds=60))
        self.rank, self.world_size, self.folder = dist.get_rank(), dist.get_world_size(), folder

    def make(self, method, settings, shapes, *, dtype="float32", op="average", loss_scale=1.0) -> DdpHandle:
        return DdpHandle(method, self.placed(settings, method), shapes, dtype, op, loss_scale)

    def gather(self, value: Any) -> list[Any]:
        everyone: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyone, value)
        return everyone

    @contextmanager
    def counting(self) -> Iterator[Counter]:
        counter = Counter()

        def counted(function: Any) -> Any:
            def call(first: torch.Tensor, second: Any = None, *rest: Any, **more: Any) -> Any:
                if function is plain["broadcast"]:
                    counter.num_bytes += first.nbytes if second == self.rank else 0
                elif function is plain["all_to_all_single"] and not rest:  # one payload, once for each rank
                    counter.num_bytes += second.nbytes // dist.get_world_size(more["group"])
                else:
                    counter.num_bytes += (second if isinstance(second, torch.Tensor) else first).nbytes
                return function(first, second, *rest, **more)

            return call

        plain = {name: getattr(dist, name) for name in ("all_reduce", "all_to_all_single", "broadcast")}
        with replaced([*((dist, name) for name in plain), (transport, "_all_gather")], counted):
            yield counter


DRIVER = DdpDriver
