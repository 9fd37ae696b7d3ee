"""Run by every rank that Horovod's elastic launcher starts, and by those that take a lost one's place.

``python elastic_ranks.py FOLDER``: a rank on host 127.0.0.1 is killed in step LOST; when the others have gone on for
TIMEOUT seconds FOLDER/hosts has a host more, and MORE steps after its rank has come the training ends. FOLDER/kept has,
for each world that there was (named by the step at which it began) and each commit, what a rank gave less what it
received, and in the end what it keeps.
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
import numpy as np
import torch

from hvdcompress.horovod.torch import Compressor
from tests.chaos.elastic_files import COMMIT, LOST, MORE, PAUSE, SHAPES, TIMEOUT, write

faulthandler.dump_traceback_later(200, exit=True)
torch.set_num_threads(1)
out = Path(sys.argv[1])


@hvd.elastic.run
def train(state: Any) -> None:
    """Train from the last commit until a rank is lost or has come, or to the end."""
    torch.manual_seed(0)
    model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()})
    settings = {"density": 0.05, "feedback": "plain", "min_elements": 0, "end_after": TIMEOUT}
    compressor = Compressor("topk", model.named_parameters(), **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compressor)
    first, began = state.step, time.monotonic()
    if first:
        model.load_state_dict(state.model)
        compressor.load(out / "state")
    pending = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    alone = os.environ["HOROVOD_HOSTNAME"] == "127.0.0.1"
    last = first + MORE if first and hvd.size() == 3 else sys.maxsize
    while state.step < last:
        time.sleep(PAUSE)
        torch.manual_seed(1000 * state.step + hvd.rank())
        given = {name: torch.randn(shape) for name, shape in SHAPES.items()}
        optimizer.zero_grad()
        sum((model[name] * gradient).sum() for name, gradient in given.items()).backward()
        if alone and state.step == LOST:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        for name, parameter in model.items():
            pending[name] += given[name].numpy() - parameter.grad.numpy()
        state.step += 1
        if first and hvd.size() == 2 and hvd.rank() == 0 and time.monotonic() > began + TIMEOUT:
            (out / "hosts").write_text("localhost:2\n127.0.0.1:1\n127.1:1\n")
        if state.step % COMMIT == 0:
            write(out / "kept" / f"{first}-{state.step}-{hvd.rank()}.npz", pending=pending)
            compressor.save(out / "state")
            state.model = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            state.commit()
    residual = {name: np.asarray(compressor.residual(name)) for name in SHAPES}
    parameters = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    write(out / "kept" / f"{first}-end-{hvd.rank()}.npz", pending=pending, residual=residual, parameters=parameters)


hvd.init()
train(hvd.elastic.TorchState(step=0, model=None))
