"""The trainings of the comparison: task, number of steps, and the target that decides it."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.momentum.tasks import Task


@dataclass(frozen=True)
class Race:
    """A training on several ranks.

    Attributes:
        task: net, data and optimizer.
        steps: of a run.
        every: steps between evaluations.
        target: the held-out score to reach: accuracy in %, or bits per byte.
    """

    task: Task
    steps: int
    every: int
    target: float

    def reached(self, score: float) -> bool:
        """Return whether a held-out score is as good as the target."""
        return score >= self.target if self.task.metric.higher_is_better else score <= self.target


RACES = {
    # 5.8 million parameters
    "mlp": Race(Task("mlp_wide", "fashion_mnist", "sgd", rate=0.05, momentum=0.9, ranks=4), 300, 20, 84.0),
    # 3.2 million, nearly all of them in one linear layer behind two convolutions
    "cnn": Race(Task("cnn_wide", "fashion_mnist", "sgd", rate=0.04, momentum=0.9, batch=16, ranks=4), 300, 20, 80.0),
    # 0.7 million, all in convolutions
    "resnet": Race(
        Task("resnet", "fashion_mnist_short", "sgd", rate=0.025, momentum=0.9, batch=8, ranks=4), 500, 20, 75.0
    ),
    # 1.8 million
    "transformer": Race(
        Task("transformer_wide", "text32", "adamw", rate=0.002, momentum=0.9, batch=16, ranks=4), 400, 20, 3.0
    ),
    # 2.0 million
    "lstm": Race(Task("lstm_wide", "text48", "sgd", rate=1.0, momentum=0.9, batch=8, clip=0.25, ranks=4), 400, 20, 2.7),
    # For a GPU: 11 million parameters, nearly all in convolutions, and 19 million in six blocks
    "resnet_wide": Race(
        Task("resnet_wide", "fashion_mnist", "sgd", rate=0.05, momentum=0.9, batch=64, ranks=4), 400, 20, 75.0
    ),
    "transformer_deep": Race(
        Task("transformer_deep", "text128", "adamw", rate=0.001, momentum=0.9, batch=16, ranks=4), 400, 20, 3.2
    ),
}
