"""The tasks of the study, by name. Contenders are in ``contenders.py``."""

from __future__ import annotations

from typing import Any

from experiments.training.experiment import Task


def constant(net: str, task: str, learning_rate: float, **more: Any) -> Task:
    """Return a training at a constant learning rate, by default of 64 examples per rank and step."""
    common = {"label": net, "warmup_steps": 0, "decays": False, "batch_size": 64}
    return Task(net=net, task=task, learning_rate=learning_rate, **{**common, **more})


ADAMW: dict[str, Any] = {"optimizer": "adamw", "weight_decay": 0.01}
TASKS = {
    "mlp": constant("mlp", "fashion_mnist_centred", 0.05),
    "cnn": constant("cnn", "fashion_mnist_centred", 0.02, batch_size=32),
    "mnist_example": constant("mnist_example", "fashion_mnist_example", 0.02, momentum=0.5),
    "lstm": constant("lstm", "bytes48", 1.0, batch_size=16, clip_norm=0.25, clip="before"),
    "transformer": constant("transformer", "bytes32", 0.002, batch_size=16, **ADAMW),
    "lstm_adamw": constant("lstm", "bytes48", 0.003, batch_size=16, **ADAMW),
    "cnn_adamw": constant("cnn", "fashion_mnist_centred", 0.001, batch_size=32, **ADAMW),
    "transformer_muon": constant("transformer", "bytes32", 0.002, batch_size=16, optimizer="muon", weight_decay=0.01),
    "transformer_rmsprop": constant("transformer", "bytes32", 0.0002, batch_size=16, optimizer="rmsprop"),
    "transformer_adagrad": constant("transformer", "bytes32", 0.02, batch_size=16, optimizer="adagrad", momentum=0.0),
    # those of the papers' claims, near the largest rate that they bear; 300 steps suffice
    "fnn3": constant("fnn3", "fashion_mnist", 0.05, batch_size=32, decays=True),
    "lenet5": constant("lenet5", "fashion_mnist", 0.05, batch_size=32, decays=True),
}
