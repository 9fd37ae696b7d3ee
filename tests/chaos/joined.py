"""Run by two ranks: rank 1 has no more data and calls ``hvd.join()``, which must be what rank 0's error names.

``python joined.py OUT METHOD``
"""

from __future__ import annotations

import faulthandler
import sys
from pathlib import Path

import horovod.torch as hvd
import torch

from hvdcompress.horovod.torch import Compressor, PeerError

faulthandler.dump_traceback_later(40, exit=True)
out = Path(sys.argv[1])
hvd.init()
weight = torch.nn.Parameter(torch.zeros(64, 64))
comp = Compressor(sys.argv[2], [("w", weight)])
opt = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), named_parameters=[("w", weight)], compression=comp)
for step in range(4):
    if step == 2 and hvd.rank() == 1:
        hvd.join()
    opt.zero_grad()
    (weight * (step + hvd.rank())).sum().backward()
    try:
        opt.step()
    except PeerError as error:
        (out / "error").write_text(str(error))
        raise
