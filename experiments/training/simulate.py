"""Trainings in one process with any number of simulated ranks.

All ranks have the same weights, so there is one net and one optimizer. Each rank has its shard of the data, its
gradient and, in a :class:`~hvdcompress.loopback.Loopback`, its residual. The arithmetic is that of real ranks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from experiments.training import loop, models_torch
from experiments.training.experiment import Task
from experiments.training.tasks import data_of, net_of
from hvdcompress._torch.optimizers import adapted, waiting_of
from hvdcompress.loopback import Loopback

Tensors = dict[str, np.ndarray[Any, Any]]


class Moment(NamedTuple):
    """A step that has been taken."""

    step: int  #: from 0
    loss: float  #: the ranks' mean
    gradients: list[Tensors]  #: each rank's, by the tensors' names
    residuals: list[Tensors]  #: each rank's before the exchange, where they were asked for; zeros where none is kept
    reduced: Tensors  #: the exchange's result

    def accumulated(self, rank: int) -> Tensors:
        """Return what a rank selects from: gradient + residual."""
        return {name: gradient + self.residuals[rank][name] for name, gradient in self.gradients[rank].items()}


class Simulation:
    """One training. Contenders of a seed start from the same weights, and their ranks draw the same batches.

    Args:
        task: the net, its data and its optimizer.
        plan: the method and its settings.
        ranks: how many.
        seed: of weights, batches and the method.

    Attributes:
        net: the ranks, with their ledger.
    """

    def __init__(self, task: Task, plan: Mapping[str, Any], ranks: int, seed: int):
        torch.set_num_threads(1)
        self.task = task
        self.data = data_of(task.task)
        self.model = self._build(seed)
        self.optimizer, self.net = self._exchange_and_update({"seed": seed, **plan}, ranks)
        self._batches = [self.data.batches(rank, ranks, seed, task.batch_size) for rank in range(ranks)]

    def _exchange_and_update(self, plan: Mapping[str, Any], ranks: int) -> tuple[Any, Loopback]:
        """Return the optimizer of :attr:`model`, and the ranks that average what it gets."""
        return models_torch.optimizer_of(self.task, self.model), Loopback(plan, ranks)

    def _build(self, seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        return models_torch.build(net_of(self.task.task, self.task.net), self.data)

    def steps(self, watched: Collection[int] = ()) -> Iterator[Moment]:
        """Take and yield the task's steps. A training whose loss becomes NaN or Inf ends before that step.

        Args:
            watched: steps, from 0, whose moments have residuals.
        """
        task, parameters = self.task, dict(self.model.named_parameters())
        clip = task.clip_norm if task.clip == "before" else None
        for step in range(task.steps):
            found = [models_torch.gradients_of(self.model, next(shares), clip) for shares in self._batches]
            gradients, losses = [one for one, _ in found], [loss for _, loss in found]
            loss = float(np.mean(losses))
            if not math.isfinite(loss):
                return
            residuals = self._residuals(gradients) if step in watched else []
            reduced = self.net.allreduce(gradients)[0]
            for name, parameter in parameters.items():
                parameter.grad = torch.from_numpy(reduced[name])
            if task.clip == "after" and task.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(parameters.values(), task.clip_norm)
            rate = loop.learning_rate(task, step)
            for group in self.optimizer.param_groups:
                group["lr"] = rate * (models_torch.MuonWithAdamW.RATIO if "ns_steps" in group else 1.0)
            self._update()
            self.net.report_metrics(learning_rate=rate, loss=loss)
            yield Moment(step, loss, gradients, residuals, reduced)

    def _update(self) -> None:
        """Take a step of the optimizer, as a driver does after an exchange."""
        optimizers = getattr(self.optimizer, "optimizers", [self.optimizer])
        named = dict(self.model.named_parameters())
        parts = lambda name: [(named[name], 0, named[name].numel())]  # noqa: E731
        own = {id(parameter) for parameter in named.values()}
        waiting = waiting_of(self.net.ranks[0].late.values(), parts, own)
        with contextlib.ExitStack() as stack:
            for optimizer in optimizers:
                stack.enter_context(adapted(optimizer, waiting))
            self.optimizer.step()

    def ratio(self) -> float:
        """Return dense bytes / bytes sent by the last rank."""
        return self.net.ledger.compression_ratio(len(self._batches) - 1)

    def score(self) -> float:
        """Return the held-out measure of the net as it is now."""
        return self.task.metric.value(*models_torch.held_out_sums(self.model, self.data.held_out(0, 1)))

    def _residuals(self, gradients: list[Tensors]) -> list[Tensors]:
        """Copy all residuals, because the exchange overwrites them. Before the first step they are zeros."""

        def one(name: str, rank: int, like: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            try:
                return np.array(self.net.residual(name, rank))
            except KeyError:
                return np.zeros_like(like)

        return [{name: one(name, rank, g) for name, g in tensors.items()} for rank, tensors in enumerate(gradients)]
