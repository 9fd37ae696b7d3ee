"""Shared by the tests of TensorFlow and Keras: gradients that we choose, and comparisons with the loopback."""

from __future__ import annotations

import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvdcompress.horovod.tensorflow import Compressor
from hvdcompress.testing import Trial
from tests.ranks import checks
from tests.ranks.checks import assert_close, heavy_tailed, summed
from tests.ranks.drivers.tensorflow import TensorFlowDriver, TensorFlowHandle, yardstick

SHAPES = TensorFlowDriver.shapes
SPARSE = {"density": 0.1, "min_elements": 0}


def everyone(step: int, shapes: Mapping = SHAPES) -> list[dict[str, np.ndarray]]:
    """Return every rank's gradients of a step."""
    return [heavy_tailed(shapes, step, rank) for rank in range(hvd.size())]


def gradients(step: int, shapes: Mapping = SHAPES) -> dict[str, np.ndarray]:
    """Return this rank's gradients of a step."""
    return heavy_tailed(shapes, step, hvd.rank())


def compressor(method: str, **settings: Any) -> Compressor:
    return Compressor(method, names=list(SHAPES), **settings)


class Model(TensorFlowHandle):
    """Variables whose gradients we choose: called with gradients, it gives the reduced ones.

    Tests of the tape's options do without autograph, as tracing takes five times as long with it.
    """

    def __init__(self, comp: Compressor, shapes: Mapping = SHAPES, autograph: bool = True, **options: Any):
        super().__init__(comp, shapes, **options)
        self.step = tf.function(self.reduced, autograph=autograph)

    def __call__(self, given: dict[str, np.ndarray], step: Callable | None = None) -> dict[str, np.ndarray]:
        return self.reduce(given, step)


def reference(method: str, world_size: int = 0, **settings: Any) -> Trial:
    """Return the loopback, which takes four dimensions for TensorFlow's."""
    return yardstick(method, world_size or hvd.size(), **settings)


def assert_reduced(
    got: Mapping[str, Any], net: Trial, inputs: list[dict], what: object, tolerance: tuple[float, float] | None = None
) -> None:
    """Check that all ranks have what the loopback ``net`` reduces the same inputs to."""
    found = {name: np.array(array) for name, array in got.items()}
    assert_close(found, net.allreduce_many(inputs)[0], tolerance or summed(hvd.size()), str(what))
    assert_same_on_all_ranks(found, str(what))


def assert_same_on_all_ranks(arrays: Mapping[str, np.ndarray], what: str) -> None:
    checks.assert_same_on_all_ranks(dict(arrays), hvd.allgather_object, what)


def assert_same_variables(variables: Iterable[Any], what: str) -> None:
    assert_same_on_all_ranks({str(number): np.array(each) for number, each in enumerate(variables)}, what)


def refused(kind: type[BaseException] | tuple, words: list[str], run: Callable[[], object]) -> None:
    """``run`` raises on every rank, with these words in its message."""
    checks.must_raise(kind, words, run, hvd.allgather_object, same=False)
