"""Run by several ranks: rank 1 is killed in the middle of a step, and the others must not wait for it for ever."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from pathlib import Path

import horovod.torch as hvd
import torch

from hvdcompress.horovod.torch import Compressor

faulthandler.dump_traceback_later(90, exit=True)
out = Path(sys.argv[1])
hvd.init()
weight = torch.nn.Parameter(torch.zeros(64, 64))
comp = Compressor("scalecom", [("w", weight)], density=0.1, nodes=int(os.environ.get("NODES", "0")))
opt = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), named_parameters=[("w", weight)], compression=comp)
for step in range(5):
    opt.zero_grad()
    (weight * (step + hvd.rank())).sum().backward()
    if step == 3 and hvd.rank() == 1:
        (out / "before").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    opt.step()
(out / "survivor").touch()
