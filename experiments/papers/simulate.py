"""Train a task in one process with any number of simulated ranks, and look at what they exchange.

All ranks have the same weights, so there is one net and one optimizer. Each rank has its shard of the data, its
gradient and, in a :class:`~hvdcompress.loopback.Loopback`, its residual. The arithmetic is that of real ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from experiments import phases
from experiments.training import loop, models_torch
from experiments.training.experiment import Task
from experiments.training.tasks import TASKS, Bytes, Images, net_of
from hvdcompress.loopback import Loopback
from hvdcompress.optimizers import SGD

Tensors = dict[str, np.ndarray[Any, Any]]
Settings = dict[str, Any]
TEXT: Settings = {"task": "bytes", "batch_size": 8, "learning_rate": 0.6, "momentum": 0.7, "clip_norm": 1.0}
#: how nets are trained, where it is not 32 examples of Fashion-MNIST per rank and a learning rate of 0.05
NETS: dict[str, Settings] = {
    "resnet20": {"batch_size": 8},
    "digits_net": {"task": "noisy_digits", "learning_rate": 0.02},
    "byte_lstm": TEXT,
    "byte_transformer": TEXT,
}


class Moment(NamedTuple):
    """One step after the exchange, before the update."""

    step: int  #: from 0
    gradients: list[Tensors]  #: each rank's, by the tensors' names
    residuals: list[Tensors]  #: each rank's before the exchange; zeros where none is kept
    reduced: Tensors  #: the exchange's result

    def accumulated(self, rank: int) -> Tensors:
        """Return what a rank selects from: gradient + residual."""
        return {name: gradient + self.residuals[rank][name] for name, gradient in self.gradients[rank].items()}


class Trained(NamedTuple):
    """How a training went."""

    losses: list[float]  #: of each step, the ranks' mean; shorter if the training diverged
    value: float  #: the held-out measure; NaN if the training diverged or was looked at
    ratio: float  #: compression ratio by the bytes that a rank hands to collectives
    wire: float  #: by the bytes that it transmits, if collectives are rings; NaN for one rank
    rows: list[Settings]  #: what ``look`` returned, with step and phase


def training(net: str, steps: int, **changed: Any) -> Settings:
    """Return the training of a net as plain data, the keys of an experiment's file without a label."""
    usual = {"task": "fashion_mnist", "batch_size": 32, "learning_rate": 0.05}
    return {"net": net, "steps": steps, "warmup_steps": steps // 10, **usual, **NETS.get(net, {}), **changed}


def spread_out(steps: int, count: int) -> set[int]:
    """Return about ``count`` steps, evenly over a training, the last one among them.

    >>> sorted(spread_out(100, 4))
    [24, 49, 74, 99]
    """
    return {round((number + 1) * steps / count) - 1 for number in range(min(count, steps))}


def task_of(task: Settings) -> Task:
    """Return a task from plain data."""
    return Task.model_validate({"label": task["task"], **task})


@cache
def data_of(task: str) -> Images | Bytes:
    """Return a task's data, read once per process."""
    return TASKS[task].load()


def train(
    task: Settings,
    method: Settings,
    ranks: int,
    seed: int,
    look: Callable[[Moment], list[Settings]] = lambda _: [],
    at: Collection[int] = (),
    momentum: str = "keep",
) -> Trained:
    """Train, and look at some of the steps. A training whose loss is NaN or Inf ends there.

    Args:
        task: as :func:`task_of` reads it.
        method: a method and its settings, as plans have them.
        ranks: how many.
        seed: of weights, batches and the method.
        look: is called with the :class:`Moment` of each step in ``at``; its rows are kept.
        at: steps, from 0. The training ends after the last of them, and its held-out measure is not taken.
        momentum: ``optimizer_momentum`` of the plan; the papers keep it.
    """
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    given, data = task_of(task), data_of(task["task"])
    model = models_torch.build(net_of(given.task, given.net), data)
    parameters = dict(model.named_parameters())
    plan = {"seed": seed, **method, "optimizer_momentum": momentum}
    if given.clip == "after":
        plan["clip_norm"] = given.clip_norm
    net = Loopback(plan, ranks, optimizer=SGD(given.momentum))
    sgd = torch.optim.SGD(parameters.values(), lr=0.0, momentum=given.momentum, weight_decay=given.weight_decay)
    batches = [data.batches(rank, ranks, seed, given.batch_size) for rank in range(ranks)]
    losses: list[float] = []
    rows: list[Settings] = []
    for step in range(max(at) + 1 if at else given.steps):
        clip = given.clip_norm if given.clip == "before" else None
        found = [models_torch.gradients_of(model, next(shares), clip) for shares in batches]
        gradients = [one for one, _ in found]
        loss = float(np.mean([loss for _, loss in found]))
        if not math.isfinite(loss):
            break
        losses.append(loss)
        before = _residuals(net, gradients) if step in at else []
        reduced = net.allreduce_many(gradients)[0]
        if step in at:
            place = {"step": step, "phase": phases.phase_of(step, given.steps)}
            rows += [{**place, **row} for row in look(Moment(step, gradients, before, reduced))]
        for name, parameter in parameters.items():
            parameter.grad = torch.from_numpy(reduced[name])
        sgd.param_groups[0]["lr"] = rate = loop.learning_rate(given, step)
        sgd.step()
        net.observe(learning_rate=rate, loss=loss)
    whole = not at and len(losses) == given.steps
    score = TASKS[given.task].metric.value
    value = score(*models_torch.held_out_sums(model, data.held_out(0, 1))) if whole else math.nan
    return Trained(losses, value, net.ledger.compression_ratio(ranks - 1), wire_ratio(net), rows)


def accuracy(task: Settings, method: Settings, ranks: int, seed: int, momentum: str = "keep") -> Settings:
    """Train, and return ``value``, ``ratio`` and ``wire`` of :class:`Trained`, and the mean losses of its twentieths.

    If the training diverged, ``value`` is NaN, and there are no ``losses``.
    """
    trained = train(task, method, ranks, seed, momentum=momentum)
    parts = [] if math.isnan(trained.value) else np.array_split(trained.losses, min(20, len(trained.losses)))
    losses = [float(np.mean(part)) for part in parts]
    return {"value": trained.value, "ratio": trained.ratio, "wire": trained.wire, "losses": losses}


def wire_ratio(net: Loopback) -> float:
    """Return the bytes that dense rings would have transmitted, divided by those that the last rank did."""
    rank = net.world_size - 1
    dense = net.ledger.dense_bytes(rank) * 2 * (net.world_size - 1) / net.world_size
    return dense / sent if (sent := net.ledger.bytes_on_wire(rank)) else math.nan


def _residuals(net: Loopback, gradients: list[Tensors]) -> list[Tensors]:
    """Copy all residuals, because the exchange overwrites them. Before the first step they are zeros."""

    def one(name: str, rank: int, like: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        try:
            return np.array(net.residual(name, rank))
        except KeyError:
            return np.zeros_like(like)

    return [{name: one(name, rank, g) for name, g in tensors.items()} for rank, tensors in enumerate(gradients)]
