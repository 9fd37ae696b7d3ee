"""Run by two ranks that take local steps; rank 1 is killed between two exchanges: ``python local_steps.py OUT``.

``DRIVER`` in the environment: "ddp", whose steps are counted by its hook, or "torch" for Horovod. When the ranks are
started again, they go on from OUT/state to the end, and compare the result with that of a training without an
interruption.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

from hvdcompress import ddp
from hvdcompress.local_steps import LocalSteps
from tests.ranks.drivers import driver_of

EVERY, KILLED, LAST = 3, 8, 12  #: steps

faulthandler.dump_traceback_later(90, exit=True)
out = Path(sys.argv[1])
by_one_line = os.environ["DRIVER"] == "ddp"
rank = driver_of(os.environ["DRIVER"], out).rank
is_restarted = (out / "killed").exists()


def train(first: int, checkpoint: Path | None = None) -> dict[str, torch.Tensor]:
    """Train from step ``first`` to the end, and return the parameters."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    settings = {"method": "topk", "density": 0.1, "checkpoint": checkpoint}
    if by_one_line:
        net: torch.nn.Module = DistributedDataParallel(model)
        local = ddp.attach(net, local_steps=EVERY, **settings)
    else:
        net, local = model, LocalSteps(model, sgd, every=EVERY, **settings)
    with local:
        assert local.steps == first
        for step in range(first, LAST):
            if step == KILLED and rank == 1 and not is_restarted:
                (out / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            torch.manual_seed(1000 * step + rank)
            sgd.zero_grad()
            net(torch.randn(8, 64)).square().mean().backward()
            sgd.step()
            if not by_one_line:
                local.step()
        local.synchronize()
    return model.state_dict()


found = train(6 if is_restarted else 0, out / "state")
for name, tensor in train(0).items():
    assert torch.equal(found[name], tensor), name
(out / f"end-{rank}").touch()
