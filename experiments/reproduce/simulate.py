"""Train a task in one process with as many simulated ranks as one likes, and look at what they exchange.

The net and the optimizer are there once, as all ranks have the same; each rank has its shard of the data, its gradient
and, in a :class:`~hvdcompress.loopback.Loopback`, its residual. The arithmetic is that of real ranks.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from experiments import phases
from experiments.training import loop, models_torch
from experiments.training.experiment import Run, Task, TrainedEntry
from experiments.training.tasks import TASKS, Bytes, Images, net_of
from hvdcompress.loopback import Loopback
from hvdcompress.method import OptimizerMomentum
from hvdcompress.optimizers import SGD

Tensors = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Moment:
    """One step, as a claim sees it: after the backward passes and the exchange, before the update.

    Attributes:
        step: from 0.
        phase: "early", "middle" or "late" (thirds of the training).
        rate: the learning rate.
        loss: the ranks' mean.
        gradients: each rank's, by the tensors' names.
        residuals: each rank's as they were before the exchange; zeros where none is kept.
        reduced: the exchange's result.
        net: the ranks.
    """

    step: int
    phase: str
    rate: float
    loss: float
    gradients: list[Tensors]
    residuals: list[Tensors]
    reduced: Tensors
    net: Loopback

    def accumulated(self, rank: int) -> Tensors:
        """What a rank selects from: gradient + residual."""
        return {name: gradient + self.residuals[rank][name] for name, gradient in self.gradients[rank].items()}


@dataclass(frozen=True)
class Trained:
    """How a training went: each step's loss, the held-out measure, compression ratios, and what ``look`` returned.

    ``rate`` counts the bytes that a rank hands to collectives, ``wire`` those that it transmits, as rings.
    """

    losses: list[float]
    value: float
    rate: float
    wire: float
    rows: list[Any]


def run_of(task: dict[str, Any], method: dict[str, Any], ranks: int, seed: int) -> Run:
    """A training from plain data, the keys of an experiment's file: ``task`` and ``method`` without labels."""
    entry = TrainedEntry.model_validate({"label": method["method"], **method})
    return Run(Task.model_validate({"label": task["task"], **task}), entry, seed, ranks)


@cache
def data_of(task: str, path: str | None) -> Images | Bytes:
    """A task's data, read once per process."""
    return TASKS[task].load(**({"path": path} if path else {}))


def spread_out(steps: int, count: int) -> set[int]:
    """About ``count`` steps, evenly over a training, the last one among them.

    >>> sorted(spread_out(100, 4))
    [24, 49, 74, 99]
    """
    return {round((number + 1) * steps / count) - 1 for number in range(min(count, steps))}


def train(
    run: Run,
    look: Callable[[Moment], Any] | None = None,
    at: Collection[int] = (),
    until: int | None = None,
    momentum: OptimizerMomentum = "keep",
) -> Trained:
    """Train, and look at some of the steps.

    Args:
        run: task, method, seed and ranks; ``run_of`` makes one.
        look: is called with the :class:`Moment` of each step in ``at``; what it returns is kept.
        at: steps, from 0.
        until: end after so many steps of the training's schedule, without a held-out measure (NaN).
        momentum: what happens to the optimizer's momentum; the papers keep it.

    Raises:
        Diverged: the loss is not finite any more.
    """
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    task, data = run.task, data_of(run.task.task)
    model = models_torch.build(net_of(task.task, task.net), data)
    parameters = dict(model.named_parameters())
    plan = {"seed": run.seed, **run.method.settings, "optimizer_momentum": momentum}
    if task.clip == "after":
        plan["clip_norm"] = task.clip_norm
    net = Loopback(plan, run.ranks, optimizer=SGD(task.momentum))
    sgd = torch.optim.SGD(parameters.values(), lr=0.0, momentum=task.momentum, weight_decay=task.weight_decay)
    batches = [data.batches(rank, run.ranks, run.seed, task.batch_size) for rank in range(run.ranks)]
    losses, rows = [], []
    for step in range(until or task.steps):
        found = [_gradients(model, parameters, next(shares)) for shares in batches]
        gradients, loss = [one for one, _ in found], float(np.mean([each for _, each in found]))
        if task.clip == "before" and task.clip_norm is not None:
            gradients = [_clipped(one, task.clip_norm) for one in gradients]
        if not np.isfinite(loss):
            raise loop.Diverged(f"the loss is {loss} at step {step + 1}")
        before = _residuals(net, gradients) if step in at else []
        reduced = net.allreduce_many(gradients)[0]
        rate = loop.learning_rate(task, step)
        if step in at and look is not None:
            phase = phases.phase_of(step, task.steps)
            rows.append(look(Moment(step, phase, rate, loss, gradients, before, reduced, net)))
        _update(parameters, reduced, sgd, rate)
        net.observe(learning_rate=rate, loss=loss)
        losses.append(loss)
    value, last = math.nan if until else evaluate(model, task.task, data), run.ranks - 1
    return Trained(losses, value, net.ledger.compression_ratio(last), wire_rate(net), rows)


def wire_rate(net: Loopback) -> float:
    """The bytes that dense rings would have transmitted, by those that were: of the last rank; NaN for one rank."""
    rank = net.world_size - 1
    dense = net.ledger.dense_bytes(rank) * 2 * (net.world_size - 1) / net.world_size
    return dense / sent if (sent := net.ledger.bytes_on_wire(rank)) else math.nan


def _gradients(model: torch.nn.Module, parameters: dict[str, Any], batch: Any) -> tuple[Tensors, float]:
    x, y = map(torch.from_numpy, batch)
    model.zero_grad()
    loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
    loss.backward()
    return {name: parameter.grad.numpy() for name, parameter in parameters.items()}, loss.item()


def _clipped(gradients: Tensors, most: float) -> Tensors:
    """A rank's gradients, scaled so that the norm of all together is ``most`` at most."""
    norm = math.sqrt(sum(float(np.vdot(g, g)) for g in gradients.values()))
    factor = np.float32(min(1.0, most / (norm + 1e-6)))
    return {name: g * factor for name, g in gradients.items()}


def _residuals(net: Loopback, gradients: list[Tensors]) -> list[Tensors]:
    """Copies of all residuals, as the exchange writes over them."""

    def one(name: str, rank: int, like: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        try:
            return np.array(net.residual(name, rank))
        except KeyError:  # before the first step
            return np.zeros_like(like)

    return [{name: one(name, rank, g) for name, g in tensors.items()} for rank, tensors in enumerate(gradients)]


def _update(parameters: dict[str, Any], reduced: Tensors, sgd: Any, rate: float) -> None:
    for name, parameter in parameters.items():
        parameter.grad = torch.from_numpy(reduced[name])
    for group in sgd.param_groups:
        group["lr"] = rate
    sgd.step()


@torch.no_grad()
def evaluate(model: torch.nn.Module, task: str, data: Images | Bytes) -> float:
    """The task's measure on the whole held-out set."""
    sums = np.zeros(3)
    for batch in data.held_out(0, 1):
        x, y = map(torch.from_numpy, batch)
        logits = model(x).flatten(0, -2)
        nll = F.cross_entropy(logits, y.flatten(), reduction="sum")
        sums += [float(nll), float((logits.argmax(1) == y.flatten()).sum()), y.numel()]
    return TASKS[task].metric.value(*sums)


def accuracy(
    task: dict[str, Any], method: dict[str, Any], ranks: int, seed: int, momentum: OptimizerMomentum = "keep"
) -> dict[str, Any]:
    """Train: the held-out measure, the compression ratio, and the loss over the last twentieth of the steps."""
    try:
        trained = train(run_of(task, method, ranks, seed), momentum=momentum)
    except loop.Diverged:
        return {**dict.fromkeys(("value", "rate", "wire", "loss"), math.nan), "losses": []}
    last = max(1, len(trained.losses) // 20)
    losses = [float(np.mean(part)) for part in np.array_split(trained.losses, min(50, len(trained.losses)))]
    return {
        "value": trained.value,
        "rate": trained.rate,
        "wire": trained.wire,
        "loss": statistics.fmean(trained.losses[-last:]),
        "losses": losses,
    }
