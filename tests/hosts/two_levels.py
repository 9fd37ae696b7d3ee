"""What leaves a host in a step of top-k with one level and with two. Every rank runs this script under DDP.

Rank 0 prints JSON: for each setting of ``nodes``, the bytes that left the interface of its host, and the ledger's bytes
between nodes of all ranks of its host.
"""

from __future__ import annotations

import json
import os

import torch
import torch.distributed as dist

from experiments.cluster.hosts import _sent
from hvdcompress import ddp

WARM_UP, STEPS = 3, 4


def measure(nodes: int | str) -> dict[str, float]:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(600, 1000, bias=False))
    compressor = ddp.attach(model, "topk", density=0.01, nodes=nodes, optimizer_momentum="keep")
    generator = torch.Generator().manual_seed(dist.get_rank())

    def step() -> None:
        model.zero_grad()
        model(torch.randn(8, 600, generator=generator)).square().sum().backward()

    for _ in range(WARM_UP):
        step()
    dist.barrier()
    sent, ledger = _sent("qdisc", "show", "dev", "eth0"), compressor.ledger.bytes_on_wire()
    for _ in range(STEPS):
        step()
    dist.barrier()
    sent = _sent("qdisc", "show", "dev", "eth0") - sent
    ledgers: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(ledgers, compressor.ledger.bytes_on_wire() - ledger)
    compressor.close()
    return {"interface": sent, "ledger": sum(ledgers[: int(os.environ["LOCAL_WORLD_SIZE"])])}


torch.set_num_threads(1)
dist.init_process_group("gloo")
found = {str(nodes): measure(nodes) for nodes in (0, "auto")}
if dist.get_rank() == 0:
    print(json.dumps(found), flush=True)
dist.destroy_process_group()
