"""Train every run of an experiment that has no result yet, in TensorFlow. Every rank runs this module.

    horovodrun -np 2 --mpi python -m experiments.training.train_tensorflow runs/quickstart_tensorflow

``python -m experiments run`` runs this module for experiments that say ``framework: tensorflow``.
"""

from __future__ import annotations

import time

import horovod
import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

import hvdcompress
from experiments.training import loop, models_tensorflow
from experiments.training.experiment import Run
from experiments.training.loop import Clock
from experiments.training.tasks import Batch, Bytes, Images, net_of
from hvdcompress.horovod.tensorflow import Compressor
from hvdcompress.optimizers import SGD

# one core per rank: threads of several ranks would fight for the same ones
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(2)


class Trainer:
    """A net, SGD with momentum as PyTorch has it, and the stock Horovod tape with the compression inside it."""

    def __init__(self, run: Run, data: Images | Bytes):
        task = run.task
        self.model = getattr(models_tensorflow, net_of(task.task, task.net))(data, run.seed)
        self.weights = list(self.model.weights.values())
        self.velocity = [tf.Variable(tf.zeros_like(weight)) for weight in self.weights]
        self.momentum, self.decay = task.momentum, task.weight_decay
        self.clip, self.clip_norm = task.clip, task.clip_norm
        plan = hvdcompress.load({"seed": run.seed, **run.method.settings})
        # what is clipped after the exchange must be the gradient itself, so its momentum is not cancelled
        clipped = task.clip == "after" and task.clip_norm is not None
        optimizer = SGD(0.0 if clipped else task.momentum)
        self.compressor = Compressor(plan, names=list(self.model.weights), optimizer=optimizer)
        hvd.broadcast_variables(self.weights, root_rank=0)
        x, y = next(data.batches(0, 1, 0, task.batch_size))
        rate = tf.TensorSpec((), tf.float32)
        # traced before the first step, so that the compressor knows its tensors
        self.graph = tf.function(self._step).get_concrete_function(tf.constant(x), tf.constant(y), rate)
        self.scores = tf.function(self._scores, reduce_retracing=True)

    def parameters(self) -> dict[str, np.ndarray]:
        """All parameters by name."""
        return {name: weight.numpy() for name, weight in self.model.weights.items()}

    def _step(self, x: tf.Tensor, y: tf.Tensor, rate: tf.Tensor) -> tf.Tensor:
        before = self.clip == "before" and self.clip_norm is not None
        with tf.GradientTape(persistent=before) as tape:
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, self.model(x)))
        factor = None
        if before:  # this rank's own gradient, before it meets its residual
            norm = tf.linalg.global_norm(tape.gradient(loss, self.weights))
            factor = tf.minimum(self.clip_norm / (norm + 1e-6), 1.0)
        tape = hvd.DistributedGradientTape(tape, compression=self.compressor)
        gradients = tape.gradient(loss, self.weights, factor)
        if self.clip == "after" and self.clip_norm is not None:
            gradients, _ = tf.clip_by_global_norm(gradients, self.clip_norm)
        for weight, velocity, gradient in zip(self.weights, self.velocity, gradients, strict=True):
            velocity.assign(self.momentum * velocity + gradient + self.decay * weight)
            weight.assign_sub(rate * velocity)
        return loss

    def _scores(self, x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        logits = self.model(x)
        nll = tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
        return nll, tf.reduce_sum(tf.cast(tf.argmax(logits, 1) == y, tf.float32))

    def step(self, batch: Batch, rate: float, clock: Clock) -> float:
        """Forward, backward, exchange, update; returns this rank's loss.

        Inside of a graph, waiting for other ranks cannot be told from computing: that time is not known.
        """
        before, began = self.compressor.ledger.seconds()["codec"], time.perf_counter()
        loss = float(self.graph(tf.constant(batch[0]), tf.constant(batch[1]), tf.constant(rate, tf.float32)))
        clock.total += time.perf_counter() - began
        clock.select += self.compressor.ledger.seconds()["codec"] - before
        clock.communicate = float("nan")
        return loss

    def evaluate(self, batch: Batch) -> tuple[float, float]:
        """Sums over a batch: negative log-likelihood, correct."""
        nll, correct = self.scores(tf.constant(batch[0]), tf.constant(batch[1]))
        return float(nll), float(correct)


if __name__ == "__main__":
    loop.main(__doc__, hvd, Trainer, tf, horovod)
