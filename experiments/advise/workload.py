"""What is trained: a user's model, a net of the quickstart's tasks, or shapes with a backward pass that only waits."""

from __future__ import annotations

import importlib
import itertools
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from experiments import nets
from experiments.bench import gradients

__all__ = ["Setup", "Shapes", "TaskNet", "UserModel", "Workload", "found_by", "of"]


RATE = 1e-4  # of learning: so small that no model diverges while it is measured
LEARNING_RATE = 0.05  # of a task's net while losses are compared


@dataclass(frozen=True)
class Setup:
    """A training before its first step.

    Attributes:
        model: with weights that are the same on all ranks.
        optimizer: of the model's parameters.
        batches: this rank's, endless.
        loss: of a model and a batch, in any unit.
        held_out: returns the sum of the loss over this rank's held-out examples, and their number; None if there are
            none.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    batches: Iterator[Any]
    loss: Callable[[torch.nn.Module, Any], torch.Tensor]
    held_out: Callable[[torch.nn.Module], tuple[float, int]] | None = None


class Workload(ABC):
    """Something to train: models that are alike, and losses of them.

    ``name``: for tables; ``waits``: its backward pass is not on the processors; ``untrained``: why its losses say
    nothing, empty if they say something.
    """

    name: str
    waits = False
    untrained = ""

    @abstractmethod
    def make(self, rank: int, world_size: int) -> tuple[torch.nn.Module, Callable[[torch.nn.Module], torch.Tensor]]:
        """A new model, and the function that gives the loss of the next batch; all ranks' models are equal."""

    def setup(self, rank: int, world_size: int, seed: int) -> Setup:
        """Return a training before its first step; the seed gives the weights and each rank's batches.

        Raises:
            ValueError: losses of this workload say nothing.
        """
        raise ValueError(self.untrained)

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """SGD with momentum, as the quickstart has it.

        Its rate is not zero: behind a layer that begins with zeros, gradients are zero until it has changed. Those of a
        training are not.
        """
        return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)


def found_by(words: str, option: str) -> Any:
    """What ``my.module:name`` stands for.

    Raises:
        ValueError: there is no such module, or nothing of that name in it.
    """
    module, _, name = words.partition(":")
    if not module or not name:
        raise ValueError(f"{option}: {words!r} is not of the form my.module:name")
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ValueError(f"{option}: {module} cannot be imported: {error}") from None
    except AttributeError:
        raise ValueError(f"{option}: {module} has no {name!r}") from None


class UserModel(Workload):
    """A user's model and data.

    Args:
        model: ``my.module:function``, which makes a ``torch.nn.Module``.
        data: ``my.module:function``, which makes a batch; a batch of inputs and targets is a pair.
        loss: ``my.module:function`` of model and batch; cross-entropy of a pair if it is not given.
        optimizer: ``my.module:function`` of the model, which makes the optimizer that losses are compared with.
    """

    def __init__(self, model: str, data: str, loss: str | None = None, optimizer: str | None = None):
        self.name = model.replace(":", ".")
        self._model, self._data = found_by(model, "--model"), found_by(data, "--data")
        self._loss = found_by(loss, "--loss") if loss else _cross_entropy
        self._optimizer = found_by(optimizer, "--optimizer") if optimizer else None
        self.untrained = "" if optimizer else "they depend on the optimizer, and --optimizer is not given"

    def make(self, rank: int, world_size: int) -> tuple[torch.nn.Module, Callable[[torch.nn.Module], torch.Tensor]]:
        """A model that the user's function makes, with one batch of the user's, which is used in every step."""
        torch.manual_seed(0)
        model, batch = self._make_model(), self._data()
        return model, lambda module: self._loss(module, batch)

    def _make_model(self) -> torch.nn.Module:
        model = self._model()
        if not isinstance(model, torch.nn.Module):
            raise ValueError(f"--model: {self.name} must make a torch.nn.Module, not a {type(model).__name__}")
        return model

    def setup(self, rank: int, world_size: int, seed: int) -> Setup:
        """Return the user's model and optimizer; each batch is another call of the user's function."""
        if self._optimizer is None:
            return super().setup(rank, world_size, seed)
        _seed_all(seed)
        model = self._make_model()
        optimizer = self._optimizer(model)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(f"--optimizer must make a torch.optim.Optimizer, not a {type(optimizer).__name__}")
        _seed_all(1 + seed * world_size + rank)
        return Setup(model, optimizer, (self._data() for _ in itertools.count()), self._loss)


def _seed_all(seed: int) -> None:
    """Seed every generator that a user's function may draw from."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)


def _cross_entropy(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    if not (isinstance(batch, tuple | list) and len(batch) == 2):
        raise ValueError("--data: the batch is no pair of inputs and targets: give --loss, too")
    out = model(batch[0])
    return F.cross_entropy(out.flatten(0, -2), batch[1].flatten())


class TaskNet(Workload):
    """The net of a task of the quickstart's, on its data."""

    def __init__(self, task: str, batch_size: int = 32):
        from experiments.training import tasks

        if task not in tasks.TASKS:
            raise ValueError(f"unknown task {task!r}; known: {', '.join(tasks.TASKS)}")
        self.name, self.batch_size = task, batch_size

    def make(self, rank: int, world_size: int) -> tuple[torch.nn.Module, Callable[[torch.nn.Module], torch.Tensor]]:
        """The task's net, and its batches."""
        found = self.setup(rank, world_size, 0)
        return found.model, lambda module: found.loss(module, next(found.batches))

    def setup(self, rank: int, world_size: int, seed: int) -> Setup:
        """Return the task's net, and SGD with momentum."""
        from experiments.training import models_torch, tasks

        torch.manual_seed(seed)
        data = tasks.TASKS[self.name].load()
        model = models_torch.build(tasks.net_of(self.name, None), data)
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)

        def held_out(module: torch.nn.Module) -> tuple[float, int]:
            batches = list(data.held_out(rank, world_size))
            return sum(_task_loss(module, batch, "sum").item() for batch in batches), sum(y.size for _, y in batches)

        return Setup(model, optimizer, data.batches(rank, world_size, seed, self.batch_size), _task_loss, held_out)


def _task_loss(model: torch.nn.Module, batch: tuple[np.ndarray, np.ndarray], reduction: str = "mean") -> torch.Tensor:
    x, y = map(torch.from_numpy, batch)
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten(), reduction=reduction)


class Shapes(Workload):
    """Tensors of given shapes: the backward pass waits, as for an accelerator, and hands out prepared gradients.

    Args:
        name: for tables.
        tensors: shapes by name, in the order of the net.
        backward: seconds of the backward pass, shared out by the tensors' elements.
    """

    waits = True
    untrained = "the gradients of shapes are random numbers; give --model, --data and --optimizer"

    def __init__(self, name: str, tensors: nets.Shapes, backward: float = 0.0):
        self.name, self.tensors = name, tensors
        each = backward / nets.total(tensors)
        self.pauses = [each * prod(shape) for shape in tensors.values()]

    def planned(self) -> dict[str, float]:
        """When each gradient is ready if every wait is as long as it should be: seconds by name."""
        found, now = {}, 0.0
        for name, pause in zip(reversed(self.tensors), reversed(self.pauses), strict=True):
            now += pause
            found[name] = now
        return found

    def make(self, rank: int, world_size: int) -> tuple[torch.nn.Module, Callable[[torch.nn.Module], torch.Tensor]]:
        """Parameters that take no memory, and gradients that differ from step to step."""
        model = _Tensors(self.tensors)
        first = gradients.make_gradients({name: list(shape) for name, shape in self.tensors.items()}, rank)
        steps = [first, [gradient.flip(0) for gradient in first]]  # not the same twice in a row
        number = iter(range(1 << 62))
        return model, lambda module: module(steps[next(number) % 2], self.pauses)

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """One that reads no parameter: these take no memory, and what an optimizer costs is none of the exchange."""
        return _Idle(model.parameters())


class _Tensors(torch.nn.Module):
    """Parameters of given shapes; they are never read or written, so they take no memory."""

    def __init__(self, tensors: nets.Shapes):
        super().__init__()
        self.names = list(tensors)
        for name, shape in tensors.items():
            self.register_parameter(name.replace(".", "/"), torch.nn.Parameter(torch.empty(shape)))

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """By the net's own names, which have points."""
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield name.replace("/", "."), parameter

    def forward(self, given: gradients.Gradients, pauses: list[float]) -> torch.Tensor:
        return gradients.loss(list(self.parameters()), given, pauses)


class _Idle(torch.optim.SGD):
    """An optimizer that does nothing."""

    def __init__(self, parameters: Any):
        super().__init__(parameters, lr=0.0)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Leave everything as it is."""


@dataclass(frozen=True)
class Named:
    """A workload by plain data, for ranks to make."""

    shapes: str | None = None
    backward: float = 0.0
    task: str | None = None
    batch_size: int = 32
    model: str | None = None
    data: str | None = None
    loss: str | None = None
    optimizer: str | None = None


def of(named: Named) -> Workload:
    """The workload that plain data stands for.

    Raises:
        ValueError, FileNotFoundError: there is no such thing, or not exactly one is named.
    """
    from experiments.scale.prediction import tensors_of

    if sum(one is not None for one in (named.shapes, named.task, named.model)) != 1:
        raise ValueError("give one of --model, --task and --shapes")
    if named.optimizer and not (named.model and named.data):
        raise ValueError("--optimizer is for a training of --model and --data: give these, too")
    if named.shapes:
        return Shapes(named.shapes, tensors_of(named.shapes), named.backward)
    if named.task:
        return TaskNet(named.task, named.batch_size)
    assert named.model
    if named.data is None:
        model = found_by(named.model, "--model")()
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
        return Shapes(named.model.replace(":", "."), shapes, named.backward)
    return UserModel(named.model, named.data, named.loss, named.optimizer)
