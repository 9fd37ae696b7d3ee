"""Run by every rank that torchrun's elastic agents start, at first and again when an agent is lost or has come.

``python elastic_ranks_ddp.py FOLDER [lost]``: a rank that is started with "lost" kills its agent and itself in step
LOST; three ranks that began with a saved state end after MORE steps. FOLDER/kept has, for each world that there was
(named by the step at which it began) and each save, what a rank gave less what it received, and in the end what it
keeps.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hvdcompress import ddp
from tests.chaos.elastic_files import COMMIT, LOST, MORE, PAUSE, SHAPES, write

faulthandler.dump_traceback_later(200, exit=True)
torch.set_num_threads(1)
out = Path(sys.argv[1])


class Net(torch.nn.Module):
    """Parameters whose gradients are what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))

    def forward(self, given: dict[str, torch.Tensor]) -> torch.Tensor:
        return sum((getattr(self, name) * gradient).sum() for name, gradient in given.items())


dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank, world_size = dist.get_rank(), dist.get_world_size()
net = Net()
model = DistributedDataParallel(net)
compressor = ddp.attach(model, "topk", density=0.05, feedback="plain", min_elements=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
first = 0
if (out / "state").exists():  # three ranks' at first, then two ranks'
    compressor.load(out / "state")
    first = compressor.state_dict()["steps"]["w"]
    saved = np.load(out / f"model-{first}.npz")
    net.load_state_dict({name: torch.from_numpy(saved[f"parameters.{name}"]) for name in SHAPES})
pending = {name: np.zeros(shape) for name, shape in SHAPES.items()}
step, last = first, first + MORE if first and world_size == 3 else sys.maxsize
while step < last:
    time.sleep(PAUSE)
    torch.manual_seed(1000 * step + rank)
    given = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    if step == LOST and "lost" in sys.argv and not first:
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    model(given).backward()
    optimizer.step()
    for name, parameter in net.named_parameters():
        pending[name] += given[name].numpy() - parameter.grad.numpy()
    step += 1
    if step % COMMIT == 0:
        write(out / "kept" / f"{first}-{step}-{rank}.npz", pending=pending)
        if rank == 0:
            write(out / f"model-{step}.npz", parameters=net.state_dict())
        compressor.save(out / "state")
residual = {name: compressor.residual(name) for name in SHAPES}
write(out / "kept" / f"{first}-end-{rank}.npz", pending=pending, residual=residual, parameters=net.state_dict())
dist.destroy_process_group()
