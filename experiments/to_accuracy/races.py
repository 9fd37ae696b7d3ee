"""The trainings of the comparison, each with the target that decides it, and the contenders.

A contender is a baseline of :data:`BASELINES`, optionally with settings of the optimizer (``dense@mu=0,lr=10``), or a
method as in ``momentum/contenders.py`` (``topk@density=0.002``). The baseline ``fp16`` is PyTorch's or Horovod's own;
``fp16:plain`` is the method of this library.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from experiments.attach import DENSE, FP16, NOOP, POWERSGD
from experiments.momentum import contenders
from experiments.momentum.contenders import ADAMW, Contender, constant
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


BASELINES = (NOOP, DENSE, FP16, *(f"{POWERSGD}{rank}" for rank in (1, 2, 4)))  #: Horovod has dense and fp16 alone


def baseline_of(name: str) -> str | None:
    """Return the baseline of a contender; None if it is a method of this library."""
    base = name.partition("@")[0]
    return base if base in BASELINES else None


def parse(name: str, task: Task | None = None) -> Contender:
    """Read a contender.

    Raises:
        ValueError: a method or a setting does not exist, or a baseline has settings beyond those of the optimizer.

    >>> parse("dense@mu=0,lr=10").momentum
    0.0
    """
    baseline = baseline_of(name)
    if baseline is None:
        return contenders.parse(name, task)
    dense = contenders.parse(f"none{name.removeprefix(baseline)}", task)
    if dense.settings != {"method": "none"} or dense.form != "default":
        raise ValueError(f"{name}: {baseline} takes lr, mu and beta1 only")
    return replace(dense, name=name)
