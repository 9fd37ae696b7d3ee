"""Run by every rank that an elastic launcher starts, at first and to replace a lost rank: ``python elastic.py OUT``.

``DRIVER`` in the environment: "torch" or "tensorflow" under Horovod's launcher, "ddp" under torchrun. A rank with
``LOST`` in its environment, or on host 127.0.0.1, is killed in step LOST. Under Horovod, OUT/hosts gets another host
when the others have gone on for TIMEOUT seconds. Three ranks that have started from a saved state end after MORE steps.

OUT/kept has, for each world (named by the step at which it began) and each save, the gradients of a rank less what it
received, and in the end also its residuals and parameters.
"""

from __future__ import annotations

import faulthandler
import importlib
import itertools
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from hvdcompress.engine.telemetry.observer import Observer
from tests.chaos.files import write_arrays

SHAPES = {"w": (48, 64), "b": (64,)}
SAVE_EVERY, LOST, MORE = 3, 7, 6  #: steps
PAUSE = 0.1  #: seconds between steps
TIMEOUT = 25  #: `end_after`; more than Horovod needs to see that a peer is gone, by HOROVOD_GLOO_TIMEOUT_SECONDS
SETTINGS = {"density": 0.05, "feedback": "plain", "min_elements": 0, "end_after": TIMEOUT}


class Killer(Observer):
    """Kills this rank, and its torchrun agent, when the rank sends a payload."""

    def sent(self, *_: Any, **more: Any) -> None:
        if framework_name == "ddp":
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def train(rank: int, world_size: int, state: Any = None) -> None:
    """Train from the last saved state until a rank is lost or has come, or to the end."""
    framework._numbers = itertools.count()  # which a new rank's gradients are named after, under Horovod for PyTorch
    handle = driver.make("topk", SETTINGS, SHAPES)
    first = 0
    parameters = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    pending = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    if (out / "state").exists():
        handle.load(out / "state")
        first = handle.state()["steps"]["w"]
        saved = np.load(out / f"model-{first}.npz")
        parameters = {name: saved[f"parameters.{name}"] for name in SHAPES}
    began = time.monotonic()
    last = first + MORE if first and world_size == 3 else sys.maxsize
    for step in range(first, last):
        time.sleep(PAUSE)
        rng = np.random.default_rng([step, rank])
        gradients = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
        if step == LOST and is_lost:
            handle.add_observer(Killer())
        for name, reduced in handle.reduce(gradients).items():
            parameters[name] -= 0.1 * reduced
            pending[name] += gradients[name] - reduced
        if (step + 1) % SAVE_EVERY == 0:
            write_arrays(out / "kept" / f"{first}-{step + 1}-{rank}.npz", pending=pending)
            if rank == 0:
                write_arrays(out / f"model-{step + 1}.npz", parameters=parameters)
            handle.save(out / "state")
            if state and first and world_size == 2 and time.monotonic() > began + TIMEOUT:
                (out / "hosts").write_text("localhost:2\n127.0.0.1:1\n127.1:1\n")
            if state:
                state.commit()
    residual = {name: handle.residual(name) for name in SHAPES}
    file = out / "kept" / f"{first}-end-{rank}.npz"
    write_arrays(file, pending=pending, residual=residual, parameters=parameters)


faulthandler.dump_traceback_later(200, exit=True)
out, framework_name = Path(sys.argv[1]), os.environ["DRIVER"]
is_lost = os.environ.get("HOROVOD_HOSTNAME") == "127.0.0.1" or "LOST" in os.environ
framework: Any = importlib.import_module(f"tests.ranks.drivers.{framework_name}")
driver = object.__new__(framework.DRIVER)  # its __init__ makes process sets, which elastic training does not support
if framework_name == "ddp":
    dist = framework.dist
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    train(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
else:
    from horovod.common.elastic import ObjectState

    hvd = framework.hvd
    hvd.init()
    # TensorFlowState would broadcast variables where it is made, which ranks that go on do not do again
    state = ObjectState(hvd.broadcast_object, hvd.rank)
    hvd.elastic.run(lambda state: train(hvd.rank(), hvd.size(), state))(state)
