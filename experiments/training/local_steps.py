"""Trainings with local steps, in one process with any number of simulated ranks: ``hvdcompress.local_steps``, again.

Each rank has a net, an optimizer and its shard of the data. The pseudo-gradients are averaged by a
:class:`~hvdcompress.loopback.Loopback`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from experiments.training import loop, models_torch
from experiments.training.experiment import Task
from experiments.training.simulate import Moment, Simulation, Tensors
from hvdcompress.loopback import Loopback


class LocalSimulation(Simulation):
    """One training with local steps. ``model`` is the anchor, and ``optimizer`` the outer one.

    Args:
        task: the net, its data and its inner optimizer.
        plan: the method that averages the pseudo-gradients.
        ranks: how many.
        seed: of weights, batches and the method.
        every: steps from one exchange to the next.
        outer: settings of the outer SGD.
        warmup: first steps after which parameters are averaged, uncompressed.
    """

    def __init__(
        self,
        task: Task,
        plan: Mapping[str, Any],
        ranks: int,
        seed: int,
        *,
        every: int,
        outer: Mapping[str, Any],
        warmup: int = 0,
    ):
        self.every, self.outer, self.warmup = every, outer, warmup
        super().__init__(task, plan, ranks, seed)
        self.models = [self._build(seed) for _ in range(ranks)]
        self.optimizers = [models_torch.optimizer_of(task, model) for model in self.models]

    def _exchange_and_update(self, plan: Mapping[str, Any], ranks: int) -> tuple[Any, Loopback]:
        # as LocalSteps: the outer momentum is kept, unless the plan says otherwise
        plan = {"optimizer_momentum": "keep", **plan}
        return torch.optim.SGD(self.model.parameters(), **self.outer), Loopback(plan, ranks)

    def steps(self, watched: Any = ()) -> Iterator[Moment]:
        """Take and yield the task's steps; those without an exchange reduce nothing."""
        for step in range(self.task.steps):
            rate = loop.learning_rate(self.task, step)
            losses = []
            for model, optimizer, batches in zip(self.models, self.optimizers, self._batches, strict=True):
                for group in optimizer.param_groups:
                    group["lr"] = rate
                losses.append(models_torch.gradients_of(model, next(batches), self.task.clip_norm)[1])
                optimizer.step()
            loss = float(np.mean(losses))
            if not math.isfinite(loss):
                return
            if step < self.warmup:
                self._pull(self._mean())
            elif (step + 1 - self.warmup) % self.every == 0:
                self._exchange()
            yield Moment(step, loss, [], [], {})

    @torch.no_grad()
    def _exchange(self) -> None:
        anchors = dict(self.model.named_parameters())
        pseudo: list[Tensors] = [
            {name: (anchors[name] - each).numpy() for name, each in model.named_parameters()} for model in self.models
        ]
        for name, average in self.net.allreduce(pseudo)[0].items():
            anchors[name].grad = torch.from_numpy(average)
        buffers = {name: mean for name, mean in self._mean().items() if name not in anchors}
        self._update()
        self._pull({**self.model.state_dict(), **buffers})

    def _mean(self) -> dict[str, torch.Tensor]:
        """Return the mean of all ranks' parameters and buffers; rank 0's of those that count."""
        states = [model.state_dict() for model in self.models]
        several = {name: [state[name] for state in states] for name in states[0]}
        return {
            name: torch.stack(each).mean(0) if each[0].is_floating_point() else each[0].clone()
            for name, each in several.items()
        }

    def _pull(self, state: Mapping[str, torch.Tensor]) -> None:
        """Set the anchor and all ranks' nets."""
        for model in (self.model, *self.models):
            model.load_state_dict(state)

    def ratio(self) -> float:
        """Return the compression ratio against exchanging the gradients of every step; warm-up is not counted."""
        return self.every * super().ratio()

    def score(self) -> float:
        """Return the held-out measure of the mean of all ranks' nets."""
        mean = self._build(0)
        mean.load_state_dict(self._mean())
        return self.task.metric.value(*models_torch.held_out_sums(mean, self.data.held_out(0, 1)))
