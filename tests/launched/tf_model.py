"""What the cases of the TensorFlow and the Keras drivers share: gradients, a model, and comparisons with loopback."""

from __future__ import annotations

import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

from collections.abc import Callable

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvdcompress.horovod.tensorflow import Compressor
from tests import harness
from tests.harness import heavy_tailed
from tests.promises.drivers.tensorflow import TensorFlowDriver, TensorFlowHandle, yardstick

SHAPES = TensorFlowDriver.shapes


def everyone(step: int, shapes: dict = SHAPES) -> list[dict[str, np.ndarray]]:
    """Every rank's gradients of a step."""
    return [heavy_tailed(shapes, step, rank) for rank in range(hvd.size())]


def compressor(method: str, **settings) -> Compressor:
    return Compressor(method, names=list(SHAPES), **settings)


class Model(TensorFlowHandle):
    """Variables whose gradients we choose: called with gradients, it gives the reduced ones."""

    def __init__(self, comp: Compressor, shapes: dict = SHAPES, autograph: bool = True, **options):
        super().__init__(comp, shapes, **options)
        # as users have it; cases of the tape's options do without, as to trace takes five times as long with it
        self.step = tf.function(self.reduced, autograph=autograph)

    def __call__(self, gradients: dict[str, np.ndarray], step: Callable | None = None) -> dict[str, np.ndarray]:
        return self.reduce(gradients, step)


def reference(method: str, world_size: int = 0, **settings):
    """The loopback, which takes four dimensions for TensorFlow's."""
    return yardstick(method, world_size or hvd.size(), **settings)


def assert_same_on_all_ranks(arrays: dict[str, np.ndarray], what: str) -> None:
    harness.assert_same_on_all_ranks(arrays, hvd.allgather_object, what)


def refused(kind: type[BaseException] | tuple, words: list[str], run: Callable[[], object]) -> None:
    """``run`` raises on every rank, with these words in its message."""
    try:
        run()
        message = "no error"
    except kind as error:
        message = str(error)
    messages = hvd.allgather_object(message)
    for rank, text in enumerate(messages):
        for word in words:
            assert word in text, f"rank {rank}: {word!r} is not in {text!r}"
