"""Read the momentum that PyTorch optimizers apply to each parameter.

Optimizers are read again in every step, because schedulers change their parameter groups. A hook counts the updates of
each parameter: a skipped step, or a step without a gradient, leaves the momentum buffer as it was.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, TypeAlias

import torch

from hvdcompress.parts.momentum import Momentum

Optimizers: TypeAlias = "torch.optim.Optimizer | Iterable[torch.optim.Optimizer]"


def unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """Return the PyTorch optimizer inside a wrapper of accelerate, Lightning or ZeroRedundancyOptimizer.

    Raises:
        TypeError: the argument is not a PyTorch optimizer and does not contain one.
    """
    wrapped: Any = True
    while wrapped is not None:
        inner = (getattr(optimizer, name, None) for name in ("optimizer", "_optimizer", "optim"))
        wrapped = next((each for each in inner if isinstance(each, torch.optim.Optimizer)), None)
        optimizer = optimizer if wrapped is None else wrapped
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a PyTorch optimizer, or a list of them, not {optimizer!r:.60}")
    return optimizer


def listed(optimizers: Optimizers | None) -> list[torch.optim.Optimizer]:
    """Return an ``optimizer=`` argument, which may be one optimizer, several, or None, as a list without wrappers.

    Raises:
        TypeError: an argument is not a PyTorch optimizer.
    """
    if optimizers is None:
        return []
    given: Any = [optimizers] if hasattr(optimizers, "param_groups") else optimizers
    return [unwrapped(each) for each in (given if isinstance(given, Iterable) else [given])]


class TorchReader:
    """Reads the momentum of exchanged tensors by name.

    Args:
        optimizers: one optimizer, or several. The reader does not keep them alive.
        parameters: the parameters that make up each tensor, by tensor name: one parameter, or several under FSDP.

    Raises:
        TypeError: an argument is not a PyTorch optimizer.
    """

    def __init__(self, optimizers: Optimizers, parameters: Mapping[str, Sequence[torch.nn.Parameter]]):
        self.parameters = parameters
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._updates: Counter[int] = Counter()  # parameter id -> number of updates
        self._begun: set[int] = set()  # ids of optimizers whose step has begun and is not counted yet
        self._groups: dict[int, tuple[int, int]] = {}  # parameter id -> indices of its optimizer and parameter group
        for each in listed(optimizers):
            self.add(each)

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Read this optimizer, too. It takes precedence over earlier ones that have the same parameters."""
        self._optimizers.append(weakref.ref(optimizer))
        self._begun.add(id(optimizer))  # a pre-step hook may call this: then the first step has begun already
        myself = weakref.ref(self)
        optimizer.register_step_pre_hook(_hook(myself, TorchReader.begin))
        optimizer.register_step_post_hook(_hook(myself, TorchReader.count))
        self._find_groups()

    def has(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the reader reads this optimizer."""
        return any(known() is optimizer for known in self._optimizers)

    def trains(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer has at least one of the parameters."""
        return trains(optimizer, {id(parameter) for several in self.parameters.values() for parameter in several})

    def _find_groups(self) -> None:
        for number, known in enumerate(self._optimizers):
            optimizer = known()
            for group, settings in enumerate(optimizer.param_groups if optimizer else ()):
                self._groups |= {id(parameter): (number, group) for parameter in settings["params"]}

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that an optimizer begins its step."""
        self._begun.add(id(optimizer))

    def count(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the updates of a step that has ended.

        Horovod's ``step()`` calls the step of its base class, so the post-step hook runs twice: count only once.
        """
        if id(optimizer) not in self._begun:
            return
        self._begun.discard(id(optimizer))
        for group in optimizer.param_groups:
            self._updates.update(id(parameter) for parameter in group["params"] if parameter.grad is not None)

    def __call__(self, name: str) -> Momentum | None:
        """Return the momentum of a tensor; None if its optimizer has no momentum that can be adapted.

        Raises:
            ValueError: the parameters that make up the tensor have different momentum.
        """
        parameters = self.parameters[name]
        found = {self._read(parameter) for parameter in parameters}
        if len(found) > 1:
            raise ValueError(
                f"{name}: its parameters are exchanged as one tensor but have different momentum "
                f'({sorted(map(str, found))}); give all of them the same, or set optimizer_momentum="keep"'
            )
        momentum = next(iter(found), None)
        return momentum and momentum._replace(updates=max(self._updates[id(parameter)] for parameter in parameters))

    def _read(self, parameter: torch.nn.Parameter) -> Momentum | None:
        if id(parameter) not in self._groups:
            self._find_groups()  # the program may have called add_param_group()
        number, group = self._groups.get(id(parameter), (None, 0))
        optimizer = None if number is None else self._optimizers[number]()
        if number is None or optimizer is None or group >= len(optimizer.param_groups):
            return None
        settings = optimizer.param_groups[group]
        if not isinstance(optimizer, torch.optim.SGD):
            return None
        rate = 1.0 - settings["dampening"]
        empty = optimizer.state.get(parameter, {}).get("momentum_buffer") is None
        entry = 1.0 if empty else rate  # SGD copies the first gradient into an empty buffer, without dampening
        return Momentum(settings["momentum"], rate, entry, settings["nesterov"], empty=empty)

    def kinds(self) -> list[str]:
        """Return the class and the momentum or beta1 of each optimizer, as text."""
        return [describe_method(optimizer) for known in self._optimizers if (optimizer := known())]

    def others(self) -> list[str]:
        """Return the same texts for the optimizers with momentum that cannot be adapted: all except SGD."""
        alive = [optimizer for known in self._optimizers if (optimizer := known())]
        return [
            describe_method(each) for each in alive if not isinstance(each, torch.optim.SGD) and _momentum_factor(each)
        ]


def trains(optimizer: torch.optim.Optimizer, parameters: Set[int]) -> bool:
    """Return whether an optimizer has at least one of the parameters, which are given by their ``id()``."""
    return any(id(parameter) in parameters for group in optimizer.param_groups for parameter in group["params"])


def _momentum_factor(optimizer: torch.optim.Optimizer) -> float:
    """Return the momentum or beta1 of the optimizer's first parameter group."""
    group = optimizer.param_groups[0]
    return float(group["betas"][0] if "betas" in group else group.get("momentum", 0.0))


def describe_method(optimizer: torch.optim.Optimizer) -> str:
    """Return the class and the momentum or beta1 of an optimizer, such as "AdamW with beta1 = 0.9"."""
    what = "beta1" if "betas" in optimizer.param_groups[0] else "momentum"
    return f"{type(optimizer).__name__} with {what} = {_momentum_factor(optimizer):g}"


def _hook(reference: weakref.ref[TorchReader], method: Callable[[TorchReader, torch.optim.Optimizer], None]) -> Any:
    """Return an optimizer hook that calls a method of the reader as long as the reader is alive."""

    def call(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        reader = reference()
        if reader is not None:
            method(reader, optimizer)

    return call
