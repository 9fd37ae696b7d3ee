"""Run by every rank of a launch: the stock optimizer of Keras 2, which is ``tf_keras``."""

from __future__ import annotations

import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["TF_USE_LEGACY_KERAS"] = "1"

import horovod.tensorflow
import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf
from horovod.tensorflow import allgather_object

from hvdcompress.horovod.tensorflow import Compressor
from tests import harness
from tests.harness import case


def trained(comp: Compressor, passes: int, batches: int = 12) -> tuple[tf.keras.Model, list[float]]:
    tf.keras.utils.set_random_seed(hvd.rank())
    layers = tf.keras.layers
    model = tf.keras.Sequential([layers.Dense(64, activation="tanh", input_shape=(32,)), layers.Dense(1)])
    sgd = tf.keras.optimizers.SGD(0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        sgd, compression=comp, backward_passes_per_step=passes, average_aggregated_gradients=True
    )
    model.compile(optimizer, "mse")
    x = np.random.default_rng(hvd.rank()).normal(size=(16 * batches, 32)).astype(np.float32)
    history = model.fit(
        x, x[:, :1], batch_size=16, epochs=3, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    )
    return model, history.history["loss"]


@case
def the_stock_optimizer_trains_alike_on_all_ranks() -> None:
    assert tf.keras.Model.__module__.startswith("tf_keras")
    for method, settings in (("none", {}), ("scalecom", {"density": 0.05, "beta": 1.0}), ("topk", {"density": 0.05})):
        for passes in (1, 3):
            comp = Compressor(method, **settings)
            model, losses = trained(comp, passes)
            found = allgather_object([weight.numpy().tobytes() for weight in model.weights])
            assert all(one == found[0] for one in found), f"{method}, {passes} passes: ranks differ"
            assert losses[-1] < losses[0], losses
            assert set(comp.state_dict()["steps"].values()) == {36 // passes}, comp.state_dict()["steps"]
            assert method == "none" or comp.residual("0").any()


def main() -> None:
    tf.config.threading.set_inter_op_parallelism_threads(2)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init()
    harness.run(horovod.tensorflow.rank(), lambda: horovod.tensorflow.allgather_object(0))


if __name__ == "__main__":
    main()
