"""The TensorFlow training: ``digits_net`` with SGD, and the compression in the stock Horovod tape."""

from __future__ import annotations

from collections.abc import Iterable

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import hvdcompress
from experiments.training.experiment import Run
from experiments.training.tasks import Batch, Bytes, Images
from hvdcompress.horovod.tensorflow import Compressor
from hvdcompress.optimizers import SGD

__all__ = ["TensorflowTrainer"]

# one core per rank: threads of several ranks would fight for the same ones
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(2)


#: of the weights, as PyTorch has them, so that a plan's rules match in both
NAMES = ["0.weight", "2.weight", "5.weight", "9.weight", "11.weight", "11.bias"]


def digits_net(data: Images) -> keras.Model:
    """Return ``digits_net`` of ``models_torch.py``."""
    layers, start = keras.layers, {"use_bias": False, "activation": "relu", "kernel_initializer": "he_normal"}
    parts = [keras.Input(data.x.shape[1:]), layers.Permute((2, 3, 1)), layers.Conv2D(32, 3, padding="same", **start)]
    for _ in range(2):
        parts += [layers.Conv2D(64, 3, padding="same", **start), layers.MaxPooling2D()]
    parts += [layers.Flatten(), layers.Dense(256, **start), layers.Dense(data.classes)]
    return keras.Sequential(parts)


class TensorflowTrainer:
    """The net, SGD with momentum as PyTorch has it, and the stock Horovod tape with the compression inside it."""

    def __init__(self, run: Run, data: Images | Bytes):
        assert isinstance(data, Images)
        keras.utils.set_random_seed(run.seed)
        self.model = digits_net(data)
        self.weights = [variable.value for variable in self.model.trainable_variables]
        self.velocity = [tf.Variable(tf.zeros_like(weight)) for weight in self.weights]
        self.momentum, self.decay = run.task.momentum, run.task.weight_decay
        plan = hvdcompress.load({"seed": run.seed, **run.method.settings})
        self.compressor = Compressor(plan, names=NAMES, optimizer=SGD(run.task.momentum))
        hvd.broadcast_variables(self.weights, root_rank=0)
        x, y = map(tf.constant, next(data.batches(0, 1, 0, run.task.batch_size)))
        # traced before the first step, so that the compressor knows its tensors
        self.graph = tf.function(self._step).get_concrete_function(x, y, tf.TensorSpec((), tf.float32))
        self.alone = tf.function(self._gradients)
        self.scores = tf.function(self._scores, reduce_retracing=True)
        self.alone(x, y)

    def parameters(self) -> dict[str, np.ndarray]:
        """Return all parameters by name."""
        return {name: weight.numpy() for name, weight in zip(NAMES, self.weights, strict=True)}

    def _loss(self, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, self.model(x)))

    def _gradients(self, x: tf.Tensor, y: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = self._loss(x, y)
        return tape.gradient(loss, self.weights)

    def _step(self, x: tf.Tensor, y: tf.Tensor, rate: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = self._loss(x, y)
        tape = hvd.DistributedGradientTape(tape, compression=self.compressor)
        gradients = tape.gradient(loss, self.weights)
        for weight, velocity, gradient in zip(self.weights, self.velocity, gradients, strict=True):
            velocity.assign(self.momentum * velocity + gradient + self.decay * weight)
            weight.assign_sub(rate * velocity)
        return loss

    def _scores(self, x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        logits = self.model(x)
        nll = tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
        return nll, tf.reduce_sum(tf.cast(tf.argmax(logits, 1) == y, tf.float32))

    def step(self, batch: Batch, rate: float) -> float:
        """Forward, backward, exchange, update; return this rank's loss."""
        return float(self.graph(tf.constant(batch[0]), tf.constant(batch[1]), tf.constant(rate, tf.float32)))

    def compute(self, batch: Batch) -> None:
        """Forward and backward, without the tape of Horovod."""
        self.alone(tf.constant(batch[0]), tf.constant(batch[1]))[0].numpy()

    def evaluate(self, batches: Iterable[Batch]) -> list[float]:
        """Return sums over batches: negative log-likelihood, correct, all."""
        parts = [[*map(float, self.scores(tf.constant(x), tf.constant(y))), float(y.size)] for x, y in batches]
        return np.sum([[0.0, 0.0, 0.0], *parts], axis=0).tolist()
