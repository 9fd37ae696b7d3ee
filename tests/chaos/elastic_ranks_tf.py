"""As ``elastic_ranks.py``, under TensorFlow: the same ranks, worlds and files.

``hvd.elastic.TensorFlowState`` broadcasts variables where it is made, which the ranks that go on do not do again with
one that joins them: so the state is a plain object, and has the parameters' values.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.common.elastic import ObjectState

from hvdcompress.engine.telemetry.observer import Observer
from hvdcompress.horovod.tensorflow import Compressor
from tests.chaos.elastic_files import COMMIT, LOST, MORE, PAUSE, SHAPES, TIMEOUT, write

faulthandler.dump_traceback_later(200, exit=True)
out = Path(sys.argv[1])


class Killer(Observer):
    """Kills this process when it sends its first payload in step LOST."""

    def sent(self, *_: Any, **more: Any) -> None:
        """A payload is sent."""
        if state.step == LOST:
            os.kill(os.getpid(), signal.SIGKILL)


@hvd.elastic.run
def train(state: Any) -> None:
    """Train from the last commit until a rank is lost or has come, or to the end."""
    settings = {"density": 0.05, "feedback": "plain", "min_elements": 0, "end_after": TIMEOUT}
    compressor = Compressor("topk", names=list(SHAPES), **settings)
    variables = {name: tf.Variable(tf.zeros(shape)) for name, shape in SHAPES.items()}
    first, began = state.step, time.monotonic()
    if first:
        for name, variable in variables.items():
            variable.assign(state.model[name])
        compressor.load(out / "state")
    if os.environ["HOROVOD_HOSTNAME"] == "127.0.0.1":
        compressor.watch(Killer())

    @tf.function
    def reduced(given: list[Any]) -> list[Any]:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(v * g) for v, g in zip(variables.values(), given, strict=True)])
        tape = hvd.DistributedGradientTape(tape, compression=compressor)
        return tape.gradient(loss, list(variables.values()))

    pending = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    last = first + MORE if first and hvd.size() == 3 else sys.maxsize
    while state.step < last:
        time.sleep(PAUSE)
        rng = np.random.default_rng([state.step, hvd.rank()])
        given = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
        for (name, variable), gradient in zip(
            variables.items(), reduced([tf.constant(array) for array in given.values()]), strict=True
        ):
            variable.assign_sub(0.1 * gradient)
            pending[name] += given[name] - gradient.numpy()
        state.step += 1
        if first and hvd.size() == 2 and hvd.rank() == 0 and time.monotonic() > began + TIMEOUT:
            (out / "hosts").write_text("localhost:2\n127.0.0.1:1\n127.1:1\n")
        if state.step % COMMIT == 0:
            write(out / "kept" / f"{first}-{state.step}-{hvd.rank()}.npz", pending=pending)
            compressor.save(out / "state")
            state.model = {name: variable.numpy() for name, variable in variables.items()}
            state.commit()
    residual = {name: np.asarray(compressor.residual(name)) for name in SHAPES}
    parameters = {name: variable.numpy() for name, variable in variables.items()}
    write(out / "kept" / f"{first}-end-{hvd.rank()}.npz", pending=pending, residual=residual, parameters=parameters)


hvd.init()
state = ObjectState(hvd.broadcast_object, hvd.rank, step=0, model=None)
train(state)
