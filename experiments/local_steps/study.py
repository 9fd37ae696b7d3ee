"""Train with local steps, with simulated ranks, each run in one process.

A contender is ``dense``, which averages the gradients of every step, or ``local@key=value,…``. These keys are the
exchange's, the others the method's or its plan's:

    every=30           steps from one exchange to the next
    outer_lr=0.7       learning rate of the outer SGD
    outer_momentum=0.9 its Nesterov momentum; ``outer_lr=1,outer_momentum=0`` averages the parameters
    lr=2               multiplies the task's learning rate

>>> parse("local@every=30,method=topk,density=0.01").plan
{'method': 'topk', 'density': 0.01}
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from experiments.attach import DENSE
from experiments.momentum import study as every_step
from experiments.training import loop, models_torch
from experiments.training.experiment import Task
from experiments.training.tasks import data_of, net_of
from experiments.units import Unit
from hvdcompress.local_steps import OUTER
from hvdcompress.loopback import Loopback
from hvdcompress.optimizers import SGD
from hvdcompress.plan.reading import plan_of, settings_of

EVALUATE = 100  #: steps between evaluations


@dataclass(frozen=True)
class Contender:
    """A way to exchange parameters; see the module's docstring."""

    every: int
    outer_lr: float = OUTER["lr"]
    outer_momentum: float = OUTER["momentum"]
    lr: float = 1.0
    plan: dict[str, Any] = field(default_factory=lambda: {"method": "none"})


def parse(name: str) -> Contender:
    """Read a contender other than dense.

    Raises:
        ValueError: it is not written as the module's docstring says, or its plan is wrong.
    """
    kind, _, given = name.partition("@")
    settings = settings_of(given.split(",")) if given else {}
    if kind != "local" or "every" not in settings:
        raise ValueError(f"{name}: write dense, or local@every=30,method=topk,…")
    own = {key: settings.pop(key) for key in ("every", "outer_lr", "outer_momentum", "lr") if key in settings}
    plan = {"method": "none", **settings}
    plan_of(plan)
    return Contender(**own, plan=plan)


def units_of(
    names: Sequence[str], contenders: Sequence[str], seeds: Iterable[int], steps: int, ranks: int
) -> list[Unit]:
    """Return a unit of work per seed, task and contender.

    Args:
        names: of tasks of the momentum study.
        contenders: see the module's docstring.
        seeds: of the runs.
        steps: of a run.
        ranks: simulated ones.

    Raises:
        ValueError: a task or a contender does not exist.
    """
    units = []
    for seed in seeds:
        for unit in every_step.units_of(names, [DENSE], [seed], steps, ranks):
            for contender in contenders:
                if contender == DENSE:
                    units.append(unit)
                    continue
                parse(contender)
                changes = {"contender": contender}
                units.append(Unit(train, unit.settings | changes, unit.labels | changes))
    return units


class LocalTraining:
    """One training: a net and an optimizer per rank, the anchor, and the outer optimizer.

    Args:
        task: the net, its data and its optimizer.
        contender: how parameters are exchanged.
        ranks: how many.
        seed: of weights, batches and the method. Ranks draw the batches of every-step training with this seed.
    """

    def __init__(self, task: Task, contender: Contender, ranks: int, seed: int):
        torch.set_num_threads(1)
        self.task = task
        self.contender = contender
        self.data = data_of(task.task)
        self.models = [self._build(seed) for _ in range(ranks)]
        self.optimizers = [models_torch.optimizer_of(task, model) for model in self.models]
        self.anchor = self._build(seed)
        momentum = contender.outer_momentum
        self.outer = torch.optim.SGD(
            self.anchor.parameters(), contender.outer_lr, momentum=momentum, nesterov=momentum > 0
        )
        self.net = Loopback({"seed": seed, **contender.plan}, ranks, optimizer=SGD(momentum, nesterov=momentum > 0))
        self._batches = [self.data.batches(rank, ranks, seed, task.batch_size) for rank in range(ranks)]

    def _build(self, seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        return models_torch.build(net_of(self.task.task, self.task.net), self.data)

    def step(self, step: int) -> float:
        """Take a step on every rank, and exchange after every ``every`` steps; return the mean loss."""
        losses = []
        rate = loop.learning_rate(self.task, step)
        for model, optimizer, batches in zip(self.models, self.optimizers, self._batches, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.zero_grad()
            loss = models_torch.loss_of(model, next(batches))
            loss.backward()
            if self.task.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), self.task.clip_norm)
            optimizer.step()
            losses.append(loss.item())
        if (step + 1) % self.contender.every == 0:
            self._exchange()
        return float(np.mean(losses))

    @torch.no_grad()
    def _exchange(self) -> None:
        anchors = dict(self.anchor.named_parameters())
        pseudo = [
            {name: (anchors[name] - each).numpy() for name, each in model.named_parameters()} for model in self.models
        ]
        for name, average in self.net.allreduce_many(pseudo)[0].items():
            anchors[name].grad = torch.from_numpy(average)
        self.outer.step()
        for model in self.models:
            for name, each in model.named_parameters():
                each.copy_(anchors[name])
        self._average_buffers()

    def _average_buffers(self) -> None:
        for several in zip(*(model.buffers() for model in self.models), strict=True):
            if several[0].is_floating_point():
                mean = torch.stack(several).mean(0)
                for each in several:
                    each.copy_(mean)

    @torch.no_grad()
    def score(self) -> float:
        """Return the held-out measure of the mean of all ranks' parameters."""
        mean = self._build(0)
        for name, tensor in mean.state_dict().items():
            several = torch.stack([model.state_dict()[name] for model in self.models])
            tensor.copy_(several.float().mean(0) if several.is_floating_point() else several[0])
        return self.task.metric.value(*models_torch.held_out_sums(mean, self.data.held_out(0, 1)))


def train(task: dict[str, Any], contender: str, ranks: int, seed: int) -> dict[str, Any]:
    """Train with local steps; the record is that of ``momentum.study.train``.

    Its ``ratio`` compares dense bytes of all steps with the bytes sent.
    """
    began = time.perf_counter()
    usual = Task.model_validate(task)
    chosen = parse(contender)
    usual = usual.model_copy(update={"learning_rate": chosen.lr * usual.learning_rate})
    training = LocalTraining(usual, chosen, ranks, seed)
    evaluations: list[tuple[int, float]] = []
    value = 0.0
    for step in range(usual.steps):
        loss = training.step(step)
        if not math.isfinite(loss):
            break
        if (step + 1) % EVALUATE == 0 or step + 1 == usual.steps:
            value = training.score()
            if not math.isfinite(value):
                break
            evaluations.append((step + 1, value))
    done = bool(evaluations) and evaluations[-1][0] == usual.steps and math.isfinite(value)
    size = sum(each.numel() for each in training.anchor.parameters())
    sent = training.net.ledger.bytes_sent(ranks - 1)
    return every_step.record(done, evaluations, 4 * size * usual.steps / sent if sent else None, began)
