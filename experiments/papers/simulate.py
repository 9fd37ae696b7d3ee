"""The trainings of the papers' claims: how nets are trained with simulated ranks, and what is looked at meanwhile."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from experiments.training.experiment import Task
from experiments.training.simulate import Moment, Simulation
from hvdcompress.loopback import Loopback

PHASES = ("early", "middle", "late")


def phase_of(step: int, steps: int) -> str:
    """Return the third of ``steps`` that a step, counted from 0, is in.

    >>> [phase_of(step, 7) for step in range(7)]
    ['early', 'early', 'early', 'middle', 'middle', 'late', 'late']
    """
    return PHASES[min(step * len(PHASES) // steps, len(PHASES) - 1)]


Settings = dict[str, Any]
TEXT: Settings = {"task": "bytes", "batch_size": 8, "learning_rate": 0.6, "momentum": 0.7, "clip_norm": 1.0}
#: how nets are trained, where it is not 32 examples of Fashion-MNIST per rank and a learning rate of 0.05
NETS: dict[str, Settings] = {
    "resnet20": {"batch_size": 8},
    "digits_net": {"task": "noisy_digits", "learning_rate": 0.02},
    "byte_lstm": TEXT,
    "byte_transformer": TEXT,
}


def training(net: str, steps: int, **changed: Any) -> Settings:
    """Return the training of a net as plain data, the keys of an experiment's file."""
    return {
        "net": net,
        "steps": steps,
        "warmup_steps": steps // 10,
        "task": "fashion_mnist",
        "batch_size": 32,
        "learning_rate": 0.05,
        **NETS.get(net, {}),
        **changed,
    }


def spread_out(steps: int, count: int) -> set[int]:
    """Return about ``count`` steps, evenly over a training, the last one among them.

    >>> sorted(spread_out(100, 4))
    [24, 49, 74, 99]
    """
    return {round((number + 1) * steps / count) - 1 for number in range(min(count, steps))}


def watch(
    task: Settings,
    method: Settings,
    ranks: int,
    seed: int,
    look: Callable[[Moment], list[Settings]],
    at: Collection[int],
) -> list[Settings]:
    """Train until the last of some steps, and look at each of them. The optimizer's momentum is kept, as in the papers.

    Args:
        task: the keys of an experiment's task.
        method: a method and its settings, as plans have them.
        ranks: how many.
        seed: of weights, batches and the method.
        look: is called with the :class:`Moment` of each step in ``at``, and returns rows.
        at: steps, from 0.

    Returns:
        The rows, with step and phase.
    """
    given = Task.model_validate(task)
    rows: list[Settings] = []
    for moment in Simulation(given, {**method, "optimizer_momentum": "keep"}, ranks, seed).steps(at):
        if moment.step in at:
            place = {"step": moment.step, "phase": phase_of(moment.step, given.steps)}
            rows += [{**place, **row} for row in look(moment)]
        if moment.step == max(at):
            break
    return rows


def accuracy(task: Settings, method: Settings, ranks: int, seed: int, momentum: str = "keep") -> Settings:
    """Train with ``optimizer_momentum`` of the plan; other arguments as of :func:`watch`.

    Returns:
        ``value``: the held-out measure, NaN if the training diverged; ``ratio``: the compression ratio by the bytes
        that a rank hands to collectives; ``wire``: by those that it transmits; ``losses``: means of the training's
        twentieths, none if it diverged.
    """
    given = Task.model_validate(task)
    simulation = Simulation(given, {**method, "optimizer_momentum": momentum}, ranks, seed)
    losses = [moment.loss for moment in simulation.steps()]
    net = simulation.net
    value = simulation.score() if len(losses) == given.steps else math.nan
    parts = [] if math.isnan(value) else np.array_split(losses, min(20, given.steps))
    return {
        "value": value,
        "ratio": net.ledger.compression_ratio(ranks - 1),
        "wire": wire_ratio(net),
        "losses": [float(np.mean(part)) for part in parts],
    }


def wire_ratio(net: Loopback) -> float:
    """Return the bytes that dense rings would have transmitted, divided by those that the last rank did."""
    rank = net.world_size - 1
    dense = net.ledger.dense_bytes(rank) * 2 * (net.world_size - 1) / net.world_size
    return dense / sent if (sent := net.ledger.bytes_on_wire(rank)) else math.nan
