"""One rank of a comparison of FSDP2 models. Rank 0 prints a line of JSON per contender.

    python -m experiments.sharded.rank '{"kind": "time", "contenders": ["stock", "int4+int8"], …}'

A contender is ``stock`` (float32), ``stock-bf16`` (PyTorch's mixed precision, which also computes in bfloat16),
``copies`` (no communication: each rank copies its own values) or ``GRADIENTS+PARAMETERS``: fp32, bf16, int8, …; also
qsgd4 and qsgd8 for gradients.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from experiments.cluster.hosts import HostsError, _sent
from experiments.training.models_torch import ByteTransformer, held_out_sums, loss_of
from experiments.training.tasks import Batch, windows
from hvdcompress import fsdp

CONTEXT = 64  #: bytes of a window
TEXT = replace(windows(CONTEXT), windows_held_out=4096)
WARM_UP = 2  #: steps of a turn before the clock starts
LEVELS = ("int8", "int4", "fp8_e4m3", "fp8_e5m2")


class Copies(ReduceScatter, AllGather):
    """Collectives that send nothing: the sum is this rank's shard, and all shards are this rank's."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for an input or an output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, *_: Any, **__: Any) -> None:
        """Copy."""
        shards, rank = max(output_tensor, input_tensor, key=len).view(group.size(), -1), group.rank()
        if len(output_tensor) < len(input_tensor):
            output_tensor.copy_(shards[rank])
        else:
            shards.copy_(shards[rank].clone().expand_as(shards))


def model_of(contender: str, width: int, blocks: int, seed: int) -> tuple[torch.nn.Module, Any]:
    """Return a sharded model and its Compressor, or None."""
    torch.manual_seed(seed)
    net = ByteTransformer(CONTEXT, width, blocks)
    half = torch.bfloat16 if contender == "stock-bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=half)
    for block in net.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(net, mp_policy=policy)
    if contender == "copies":
        for module in (*net.blocks, net):
            module.set_custom_reduce_scatter(Copies())
            module.set_custom_all_gather(Copies())
    if "+" not in contender:
        return net, None
    gradients, parameters = (None if each == "fp32" else each for each in contender.split("+"))
    if gradients and gradients.startswith("qsgd"):
        return net, fsdp.attach(net, "qsgd", parameters, bits=int(gradients.removeprefix("qsgd")))
    if gradients in LEVELS:
        return net, fsdp.attach(net, "blockwise", parameters, values=gradients)
    return net, fsdp.attach(net, gradients, parameters)


class Training:
    """A model, its optimizer and its batches; the rate warms up and falls to zero."""

    def __init__(self, contender: str, given: dict[str, Any]):
        self.net, self.compressor = model_of(contender, given["width"], given["blocks"], given["seed"])
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.0)
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.batches: Iterator[Batch] = TEXT.batches(rank, ranks, given["seed"], given["batch"])
        self.steps, self.peak, self.done = given["steps"], 2e-3, 0

    def step(self) -> tuple[float, float]:
        """Take a step; return its seconds, and those that this process was on a processor."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.peak * min(1.0, (self.done + 1) / 30) * max(0.0, 1 - self.done / self.steps)
        batch = next(self.batches)
        dist.barrier()
        began, cpu = time.perf_counter(), time.process_time()
        loss_of(self.net, batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1
        return time.perf_counter() - began, time.process_time() - cpu

    def bits(self) -> float:
        """Return the loss on held-out text, in bits per byte; each rank does an equal part."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        sums = torch.tensor(held_out_sums(self.net, TEXT.held_out(rank, ranks)))
        dist.all_reduce(sums)
        return float(sums[0] / sums[2] / np.log(2))


def sent() -> int | None:
    """Return the bytes that left this host's interface; None without emulated hosts."""
    try:
        return _sent("qdisc", "show", "dev", "eth0")
    except HostsError:
        return None


def measure(given: dict[str, Any]) -> list[dict[str, Any]]:
    """Let contenders take turns; return milliseconds and bytes per step of each turn."""
    trainings = {name: Training(name, given) for name in given["contenders"]}
    found = []
    for turn in range(given["turns"]):
        for name, training in trainings.items():
            for _ in range(WARM_UP):
                training.step()
            dist.barrier()
            before = sent()
            times = [training.step() for _ in range(given["steps"])]
            after = sent()
            own = None if before is None or after is None else (after - before) / given["steps"]
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, own)
            wall, cpu = (1e3 * float(np.median(each)) for each in zip(*times, strict=True))
            sizes = None if own is None else round(float(np.mean(everyone)))
            found.append(
                {"contender": name, "turn": turn, "ms": round(wall, 2), "cpu_ms": round(cpu, 2), "bytes": sizes}
            )
    return found


def train(given: dict[str, Any]) -> list[dict[str, Any]]:
    """Train one contender to the end; return its score and peak memory."""
    training = Training(given["contender"], given)
    seconds = [training.step()[0] for _ in range(given["steps"])]
    elements = sum(parameter.numel() for parameter in training.net.parameters())
    peak = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3)
    median = round(1e3 * float(np.median(seconds)), 2)
    return [{"bits": training.bits(), "elements": elements, "ms": median, "peak_mb": peak}]


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    settings = json.loads(sys.argv[1])
    records = {"time": measure, "train": train}[settings["kind"]](settings)
    if dist.get_rank() == 0:
        for record in records:
            print(json.dumps(record), flush=True)
    dist.barrier()
    dist.destroy_process_group()
