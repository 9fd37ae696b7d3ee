"""Tests of Horovod's optimizer for Keras 2, which is ``tf_keras``."""

from __future__ import annotations

import horovod.tensorflow.keras as hvd
import numpy as np
import pytest
import tensorflow as tf

from hvdcompress.horovod.tensorflow import Compressor
from tests.ranks.checks import assert_same_on_all_ranks

pytestmark = [pytest.mark.drivers("keras2"), pytest.mark.only("Keras 2")]


@pytest.mark.parametrize(
    "passes,method,settings", [(1, "scalecom", {"density": 0.05, "beta": 1.0}), (3, "topk", {"density": 0.05})]
)
def test_fit_with_the_stock_optimizer(driver, passes, method, settings):
    """Ranks begin with different weights."""
    assert tf.keras.Model.__module__.startswith("tf_keras")
    tf.keras.utils.set_random_seed(driver.rank)
    dense = tf.keras.layers.Dense
    model = tf.keras.Sequential([dense(64, activation="tanh", input_shape=(32,)), dense(1)])
    comp, sgd = Compressor(method, **settings), tf.keras.optimizers.SGD(0.05, momentum=0.9)
    options = {"backward_passes_per_step": passes, "average_aggregated_gradients": True}
    model.compile(hvd.DistributedOptimizer(sgd, compression=comp, **options), "mse")
    x = np.random.default_rng(driver.rank).normal(size=(192, 32)).astype(np.float32)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    losses = model.fit(x, x[:, :1], batch_size=16, epochs=3, verbose=0, callbacks=callbacks).history["loss"]
    assert losses[-1] < losses[0], losses
    weights = {str(number): weight.numpy() for number, weight in enumerate(model.weights)}
    assert_same_on_all_ranks(weights, driver.gather, "weights")
    assert set(comp.state_dict()["steps"].values()) == {36 // passes}
    assert comp.residual("0").any()
