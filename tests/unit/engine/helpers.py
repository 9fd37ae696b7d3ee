"""Helpers of the engine's tests: gradients, and simulated ranks that have trained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hvdcompress.loopback import Loopback
from hvdcompress.testing import numbers

Shapes = Mapping[str, tuple[int, ...]]
Gradients = list[dict[str, np.ndarray]]  #: {name: array} of each rank

SHAPES: Shapes = {"a": (40, 50), "b": (9,), "c": (300,), "d": (17, 3)}


def gradients(shapes: Shapes = SHAPES, step: int = 0, world_size: int = 2) -> Gradients:
    """Return the gradients of all ranks in a step."""
    return [
        {name: numbers(shape, number, rank, step) for number, (name, shape) in enumerate(shapes.items())}
        for rank in range(world_size)
    ]


def train(net: Loopback, steps: Iterable[int], shapes: Shapes = SHAPES) -> list[dict[str, np.ndarray]]:
    """Reduce the gradients of some steps. Return the results of rank 0 in each step."""
    return [net.allreduce(gradients(shapes, step, net.world_size))[0] for step in steps]


def trained(
    method: str = "topk", world_size: int = 2, steps: int = 3, shapes: Shapes = SHAPES, **settings: Any
) -> Loopback:
    """Return simulated ranks that have trained for some steps."""
    net = Loopback(method, world_size, **settings)
    train(net, range(steps), shapes)
    return net


def state_dicts(net: Loopback) -> list[dict[str, Any]]:
    """Return the saved state of every rank."""
    return [rank.state_dict() for rank in net.ranks]


def load(net: Loopback, saved: Sequence[Mapping[str, Any]]) -> Loopback:
    """Load the saved state of every rank, and return the network."""
    for rank, state in zip(net.ranks, saved, strict=True):
        rank.load_state_dict(state)
    return net
