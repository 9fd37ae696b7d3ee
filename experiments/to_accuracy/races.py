"""The trainings of the comparison: task, number of steps, and the target that decides it."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.momentum.tasks import ADAMW, constant
from experiments.training.experiment import Task


@dataclass(frozen=True)
class Race:
    """A training on several ranks.

    Attributes:
        task: net, data, optimizer and number of steps.
        target: the held-out score to reach: accuracy in %, or bits per byte.
        every: steps between evaluations.
        ranks: how many.
    """

    task: Task
    target: float
    every: int = 20
    ranks: int = 4

    def reached(self, score: float) -> bool:
        """Return whether a held-out score is as good as the target."""
        return score >= self.target if self.task.metric.higher_is_better else score <= self.target


RACES = {
    "mlp": Race(constant("mlp_wide", "fashion_mnist_centred", 0.05, steps=300), 84.0),
    "cnn": Race(constant("cnn_wide", "fashion_mnist_centred", 0.04, steps=300, batch_size=16), 80.0),
    "resnet": Race(constant("resnet", "fashion_mnist_short", 0.025, steps=500, batch_size=8), 75.0),
    "transformer": Race(constant("transformer_wide", "bytes32", 0.002, steps=400, batch_size=16, **ADAMW), 3.0),
    "lstm": Race(constant("lstm_wide", "bytes48", 1.0, steps=400, batch_size=8, clip_norm=0.25), 2.7),
    # for a GPU
    "resnet_wide": Race(constant("resnet_wide", "fashion_mnist_centred", 0.05, steps=400), 75.0),
    "transformer_deep": Race(constant("transformer_deep", "bytes128", 0.001, steps=400, batch_size=16, **ADAMW), 3.2),
}
