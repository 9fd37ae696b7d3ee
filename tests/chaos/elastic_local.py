"""Run by every rank that Horovod's elastic launcher starts, as ``elastic_ranks.py``, but with local steps.

In the end, FOLDER/kept has the parameters of each rank of the last world, named by the step at which it began.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

from hvdcompress.local_steps import LocalSteps
from tests.chaos.elastic_files import COMMIT, LOST, MORE, PAUSE, TIMEOUT, write

faulthandler.dump_traceback_later(200, exit=True)
torch.set_num_threads(1)
out = Path(sys.argv[1])


@hvd.elastic.run
def train(state: Any) -> None:
    """Train from the last exchange until a rank is lost or has come, or to the end."""
    model = torch.nn.Linear(48, 64)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    settings = {"method": "topk", "density": 0.05, "end_after": TIMEOUT}
    local = LocalSteps(model, sgd, every=COMMIT, checkpoint=out / "state", **settings)
    first, began = local.steps, time.monotonic()
    alone = os.environ["HOROVOD_HOSTNAME"] == "127.0.0.1"
    last = first + MORE if first and hvd.size() == 3 else sys.maxsize
    while local.steps < last:
        time.sleep(PAUSE)
        torch.manual_seed(1000 * local.steps + hvd.rank())
        sgd.zero_grad()
        model(torch.randn(8, 48)).square().mean().backward()
        if alone and local.steps == LOST:
            os.kill(os.getpid(), signal.SIGKILL)
        sgd.step()
        if local.step():
            if first and hvd.size() == 2 and hvd.rank() == 0 and time.monotonic() > began + TIMEOUT:
                (out / "hosts").write_text("localhost:2\n127.0.0.1:1\n127.1:1\n")
            state.commit()
    write(out / "kept" / f"{first}-end-{hvd.rank()}.npz", parameters=model.state_dict())


hvd.init()
train(hvd.elastic.TorchState(step=0))
