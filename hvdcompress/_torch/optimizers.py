"""Read the momentum that PyTorch optimizers apply to parameters.

Optimizers are read again at every step, since schedules change their parameter groups. That a parameter was updated is
seen by a hook: a step that is skipped, or a parameter without a gradient, leaves the momentum buffer as it was.
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
    """Return the PyTorch optimizer in one that accelerate, Lightning or ZeroRedundancyOptimizer has wrapped.

    Raises:
        TypeError: there is none.
    """
    wrapped: Any = True
    while wrapped is not None:
        inner = (getattr(optimizer, name, None) for name in ("optimizer", "_optimizer", "optim"))
        wrapped = next((one for one in inner if isinstance(one, torch.optim.Optimizer)), None)
        optimizer = optimizer if wrapped is None else wrapped
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be an optimizer of PyTorch, or several in a list, not {optimizer!r:.60}")
    return optimizer


def listed(optimizers: Optimizers | None) -> list[torch.optim.Optimizer]:
    """Return the PyTorch optimizers among one, several, or None.

    Raises:
        TypeError: one is no optimizer of PyTorch.
    """
    if optimizers is None:
        return []
    given: Any = [optimizers] if hasattr(optimizers, "param_groups") else optimizers
    return [unwrapped(one) for one in (given if isinstance(given, Iterable) else [given])]


class TorchReader:
    """Reads the momentum of tensors by their names.

    Args:
        optimizers: one, or several. They are not kept alive.
        parameters: by name, the parameters that a tensor consists of: one, or several under FSDP.

    Raises:
        TypeError: there is no optimizer of PyTorch.
    """

    def __init__(self, optimizers: Optimizers, parameters: Mapping[str, Sequence[torch.nn.Parameter]]):
        self.parameters = parameters
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._updates: Counter[int] = Counter()  # by a parameter's id
        self._begun: set[int] = set()  # optimizers, by their id, whose step has begun and not been counted
        self._places: dict[int, tuple[int, int]] = {}  # parameter's id -> numbers of its optimizer and group
        for one in listed(optimizers):
            self.add(one)

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Read this optimizer, too. For parameters that several have, the last one counts."""
        self._optimizers.append(weakref.ref(optimizer))
        self._begun.add(id(optimizer))  # it may be in its first step
        myself = weakref.ref(self)
        optimizer.register_step_pre_hook(_calling(myself, TorchReader.begin))
        optimizer.register_step_post_hook(_calling(myself, TorchReader.count))
        self._find_places()

    def has(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether it is one of those that are read."""
        return any(known() is optimizer for known in self._optimizers)

    def trains(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer has one of the parameters."""
        return trains(optimizer, {id(parameter) for several in self.parameters.values() for parameter in several})

    def _find_places(self) -> None:
        for number, known in enumerate(self._optimizers):
            optimizer = known()
            for group, settings in enumerate(optimizer.param_groups if optimizer else ()):
                self._places |= {id(parameter): (number, group) for parameter in settings["params"]}

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer begins its step."""
        self._begun.add(id(optimizer))

    def count(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer has taken a step; once, where a step calls that of its base class, as Horovod's."""
        if id(optimizer) not in self._begun:
            return
        self._begun.discard(id(optimizer))
        for group in optimizer.param_groups:
            self._updates.update(id(parameter) for parameter in group["params"] if parameter.grad is not None)

    def __call__(self, name: str) -> Momentum | None:
        """Return the momentum of a tensor; None if its optimizer has none that can be adapted.

        Raises:
            ValueError: the parameters that it consists of have different momentum.
        """
        parameters = self.parameters[name]
        found = {self._read(parameter) for parameter in parameters}
        if len(found) > 1:
            raise ValueError(
                f"{name}: its parameters have different momentum ({sorted(map(str, found))}), and are exchanged "
                'together; give them one, or say optimizer_momentum="keep"'
            )
        one = next(iter(found), None)
        return one and one._replace(updates=max(self._updates[id(parameter)] for parameter in parameters))

    def _read(self, parameter: torch.nn.Parameter) -> Momentum | None:
        if id(parameter) not in self._places:
            self._find_places()  # of a group that was added
        number, group = self._places.get(id(parameter), (None, 0))
        optimizer = None if number is None else self._optimizers[number]()
        if number is None or optimizer is None or group >= len(optimizer.param_groups):
            return None
        settings = optimizer.param_groups[group]
        if not isinstance(optimizer, torch.optim.SGD):
            return None
        rate = 1.0 - settings["dampening"]
        empty = optimizer.state.get(parameter, {}).get("momentum_buffer") is None
        entry = 1.0 if empty else rate  # a new buffer is set to the gradient
        return Momentum(settings["momentum"], rate, entry, settings["nesterov"], empty=empty)

    def kinds(self) -> list[str]:
        """Return a line for each optimizer: its class and its momentum, or beta1."""
        return [in_words(optimizer) for known in self._optimizers if (optimizer := known())]

    def others(self) -> list[str]:
        """Return the lines of those whose momentum cannot be adapted, and is not 0."""
        there = [optimizer for known in self._optimizers if (optimizer := known())]
        return [in_words(one) for one in there if not isinstance(one, torch.optim.SGD) and _first_factor(one)]


def trains(optimizer: torch.optim.Optimizer, parameters: Set[int]) -> bool:
    """Return whether an optimizer has one of these parameters, which are given by their ids."""
    return any(id(parameter) in parameters for group in optimizer.param_groups for parameter in group["params"])


def _first_factor(optimizer: torch.optim.Optimizer) -> float:
    group = optimizer.param_groups[0]
    return float(group["betas"][0] if "betas" in group else group.get("momentum", 0.0))


def in_words(optimizer: torch.optim.Optimizer) -> str:
    """Return an optimizer's class and its momentum, such as "AdamW with beta1 = 0.9"."""
    what = "beta1" if "betas" in optimizer.param_groups[0] else "momentum"
    return f"{type(optimizer).__name__} with {what} = {_first_factor(optimizer):g}"


def _calling(reader: weakref.ref[TorchReader], method: Callable[[TorchReader, torch.optim.Optimizer], None]) -> Any:
    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        there = reader()
        if there is not None:
            method(there, optimizer)

    return note
