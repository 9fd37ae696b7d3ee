"""Run by two ranks that take local steps: one is killed between two exchanges, and later the ranks are started again.

``python local_killed.py OUT`` with ``DRIVER`` in the environment: "ddp", or "torch" for Horovod. The second time, the
ranks go on from OUT/state, and then train the same without an interruption.
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

from hvdcompress.local_steps import LocalSteps

EVERY, KILLED, LAST = 5, 12, 20

faulthandler.dump_traceback_later(90, exit=True)
torch.set_num_threads(1)
out = Path(sys.argv[1])
if os.environ["DRIVER"] == "torch":
    import horovod.torch as hvd

    hvd.init()
    rank = hvd.rank()
else:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()


def trained(first: int, checkpoint: Path | None = None) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with LocalSteps(model, sgd, every=EVERY, method="topk", density=0.1, checkpoint=checkpoint) as local:
        assert local.steps == first
        while local.steps < LAST:
            torch.manual_seed(1000 * local.steps + rank)
            sgd.zero_grad()
            model(torch.randn(8, 64)).square().mean().backward()
            sgd.step()
            if local.steps == KILLED and rank == 1 and not first and checkpoint:
                (out / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            began = time.monotonic()
            try:
                local.step()
            except Exception as error:
                (out / f"error-{rank}").write_text(f"{time.monotonic() - began} {error}")
                raise
    return model.state_dict()


got = trained(10 if (out / "killed").exists() else 0, out / "state")
for name, tensor in trained(0).items():
    assert torch.equal(got[name], tensor), name
(out / f"end-{rank}").touch()
