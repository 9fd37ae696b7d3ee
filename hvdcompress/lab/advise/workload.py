"""What is trained: a user's model, a net of the quickstart's tasks, or shapes with a backward pass that only waits."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from hvdcompress.lab import nets
from hvdcompress.lab.bench import gradients

__all__ = ["Shapes", "TaskNet", "UserModel", "Workload", "found_by", "of"]


RATE = 1e-4  # of learning: so small that no model diverges while it is measured


class Workload(ABC):
    """Something to train: models that are alike, and losses of them.

    ``name``: for tables; ``waits``: its backward pass is not on the processors.
    """

    name: str
    waits = False

    @abstractmethod
    def make(self, rank: int, world: int) -> tuple[torch.nn.Module, Callable[[torch.nn.Module], torch.Tensor]]:
        """A new model, and the function that gives the loss of the next batch; all ranks' models are equal."""

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
    """

    def __init__(self, model: str, data: str, loss: str | None = None):
        self.name = model.replace(":", ".")
        self._model, self._data = found_by(model, "--model"), found_by(data, "--data")
        self._loss = found_by(loss, "--loss") if loss else _cross_entropy

    def make(self, rank: int, world: int) -> tuple[torch.nn.Module, Callable[[torch.nn.Module], torch.Tensor]]:
        """A model that the user's function makes, with one batch of the user's, which is used in every step."""
        torch.manual_seed(0)
        model, batch = self._model(), self._data()
        if not isinstance(model, torch.nn.Module):
            raise ValueError(f"--model: {self.name} must make a torch.nn.Module, not a {type(model).__name__}")
        return model, lambda module: self._loss(module, batch)


def _cross_entropy(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    if not (isinstance(batch, tuple | list) and len(batch) == 2):
        raise ValueError("--data: the batch is no pair of inputs and targets: give --loss, too")
    out = model(batch[0])
    return F.cross_entropy(out.flatten(0, -2), batch[1].flatten())


class TaskNet(Workload):
    """The net of a task of the quickstart's, on its data."""

    def __init__(self, task: str, batch_size: int = 32):
        from hvdcompress.lab.training import tasks

        if task not in tasks.TASKS:
            raise ValueError(f"unknown task {task!r}; known: {', '.join(tasks.TASKS)}")
        self.name, self.batch_size = task, batch_size

    def make(self, rank: int, world: int) -> tuple[torch.nn.Module, Callable[[torch.nn.Module], torch.Tensor]]:
        """The task's net, and its batches."""
        from hvdcompress.lab.training import models_torch, tasks

        torch.manual_seed(0)
        data = tasks.TASKS[self.name].load()
        model = models_torch.build(tasks.net_of(self.name, None), data)
        batches: Iterator[Any] = data.batches(rank, world, 0, self.batch_size)

        def loss(module: torch.nn.Module) -> torch.Tensor:
            x, y = next(batches)
            return F.cross_entropy(module(torch.from_numpy(x)).flatten(0, -2), torch.from_numpy(y).flatten())

        return model, loss


class Shapes(Workload):
    """Tensors of given shapes: the backward pass waits, as for an accelerator, and hands out prepared gradients.

    Args:
        name: for tables.
        tensors: shapes by name, in the order of the net.
        backward: seconds of the backward pass, shared out by the tensors' elements.
    """

    waits = True

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

    def make(self, rank: int, world: int) -> tuple[torch.nn.Module, Callable[[torch.nn.Module], torch.Tensor]]:
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


def of(named: Named) -> Workload:
    """The workload that plain data stands for.

    Raises:
        ValueError, FileNotFoundError: there is no such thing, or not exactly one is named.
    """
    from hvdcompress.lab.scale.prediction import tensors_of

    if sum(one is not None for one in (named.shapes, named.task, named.model)) != 1:
        raise ValueError("give one of --model, --task and --shapes")
    if named.shapes:
        return Shapes(named.shapes, tensors_of(named.shapes), named.backward)
    if named.task:
        return TaskNet(named.task, named.batch_size)
    assert named.model
    if named.data is None:
        model = found_by(named.model, "--model")()
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
        return Shapes(named.model.replace(":", "."), shapes, named.backward)
    return UserModel(named.model, named.data, named.loss)
