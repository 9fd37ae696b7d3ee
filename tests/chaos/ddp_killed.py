"""Run by several ranks: some are killed in the middle of a step, and the others must not wait for them for ever.

``python ddp_killed.py OUT RANK…``, with ``NODES`` in the environment: 0 for one level.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hvdcompress import ddp

faulthandler.dump_traceback_later(90, exit=True)
out = Path(sys.argv[1])
killed = [*map(int, sys.argv[2:])]
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64), bucket_cap_mb=0.001)
compressor = ddp.attach(model, "scalecom", density=0.1, nodes=int(os.environ["NODES"]))
began = time.monotonic()
for step in range(5):
    loss = model(torch.full((1, 64), float(step))).sum()
    if step == 3 and dist.get_rank() in killed:
        (out / "before").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        loss.backward()
    except ddp.PeerLost as error:
        (out / f"error-{dist.get_rank()}").write_text(f"{time.monotonic() - began} {error}")
        raise
(out / "survivor").touch()
