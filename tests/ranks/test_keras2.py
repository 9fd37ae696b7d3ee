"""Horovod's optimizer for Keras 2, which is ``tf_keras``."""

from __future__ import annotations

import horovod.tensorflow.keras as hvd
import numpy as np
import pytest
import tensorflow as tf
from horovod.tensorflow import allgather_object

from hvdcompress.horovod.tensorflow import Compressor

pytestmark = [pytest.mark.drivers("keras2"), pytest.mark.only("Keras 2")]


def test_the_stock_optimizer_trains_alike_on_all_ranks() -> None:
    assert tf.keras.Model.__module__.startswith("tf_keras")
    for passes, method, settings in ((1, "scalecom", {"density": 0.05, "beta": 1.0}), (3, "topk", {"density": 0.05})):
        tf.keras.utils.set_random_seed(hvd.rank())
        dense = tf.keras.layers.Dense
        model = tf.keras.Sequential([dense(64, activation="tanh", input_shape=(32,)), dense(1)])
        comp, sgd = Compressor(method, **settings), tf.keras.optimizers.SGD(0.05, momentum=0.9)
        options = {"backward_passes_per_step": passes, "average_aggregated_gradients": True}
        model.compile(hvd.DistributedOptimizer(sgd, compression=comp, **options), "mse")
        x = np.random.default_rng(hvd.rank()).normal(size=(192, 32)).astype(np.float32)
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
        history = model.fit(x, x[:, :1], batch_size=16, epochs=3, verbose=0, callbacks=callbacks)
        found = allgather_object([weight.numpy().tobytes() for weight in model.weights])
        assert all(one == found[0] for one in found), f"{method}, {passes} passes: ranks differ"
        losses = history.history["loss"]
        assert losses[-1] < losses[0], losses
        assert set(comp.state_dict()["steps"].values()) == {36 // passes}, comp.state_dict()["steps"]
        assert comp.residual("0").any()
