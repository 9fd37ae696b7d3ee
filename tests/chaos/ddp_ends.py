"""Rank 1 ends by an exception inside of a backward pass that nobody catches: ``python ddp_ends.py KIND``."""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hvdcompress import ddp
from tests.launched.breaking import Two

KINDS = {"error": ValueError("made by the test"), "exit": SystemExit(3), "interrupt": KeyboardInterrupt()}

dist.init_process_group("gloo", timeout=timedelta(seconds=300))
model = DistributedDataParallel(Two(), bucket_cap_mb=1e-5)
compressor = ddp.attach(model, "topk", density=0.05, end_after=300)
x = torch.ones(3, 40)
model(x).backward()
model(x, KINDS[sys.argv[1]] if dist.get_rank() == 1 else None).backward()
