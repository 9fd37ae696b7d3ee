"""Run by ranks that save a training with torch.distributed.checkpoint, or load it: ``python dcp_ranks.py FOLDER``.

The first launch trains and saves. Others, with other numbers of ranks, load and train on.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel

from hvdcompress import ddp

folder = Path(sys.argv[1])
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(30, 40))
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
compressor = ddp.attach(model, "topk", density=0.1, min_elements=10)


def train() -> None:
    for step in range(3):
        torch.manual_seed(100 * step + dist.get_rank())
        sgd.zero_grad()
        model(torch.randn(8, 30)).square().mean().backward()
        sgd.step()


def total() -> torch.Tensor:
    """Return the sum of the residuals of all ranks."""
    found = compressor.residual("weight")
    dist.all_reduce(found)
    return found


state = {"model": model.state_dict(), "compressor": compressor}
if not folder.exists():
    train()
    dcp.save(state, checkpoint_id=folder)
    torch.save(total(), folder / "total.pt")
else:
    missing = ""
    try:
        dcp.load(dict(state), checkpoint_id=folder)
    except dcp.CheckpointException as error:
        missing = str(error)
    assert f"Missing key in checkpoint state_dict: compressor.rank-{dist.get_rank()}" in missing, missing
    dcp.load(state, checkpoint_id=folder, planner=ddp.ReshardingPlanner())
    want = torch.load(folder / "total.pt")
    assert want.abs().max() > 0
    torch.testing.assert_close(total(), want)
    assert compressor.rank_state.steps() == {"weight": 3, "bias": 3}
    train()
dist.destroy_process_group()
