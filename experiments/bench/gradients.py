"""Gradients to measure with: random ones of given shapes, and a backward pass that hands out prepared ones."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["Gradients", "Shapes", "loss", "make_gradients"]

Gradients = list[torch.Tensor]
Shapes = dict[str, list[int]]


class Given(torch.autograd.Function):
    """A parameter's part in the loss: its gradient is taken out of a box, after a pause."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, box: Gradients, pause: float) -> torch.Tensor:
        ctx.box, ctx.pause = box, pause
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        if ctx.pause:
            time.sleep(ctx.pause)
        return ctx.box.pop(), None, None  # nobody else holds it, so autograd makes it `.grad` without a copy


def loss(
    parameters: list[torch.nn.Parameter], gradients: Gradients, pauses: Sequence[float] | None = None
) -> torch.Tensor:
    """A loss whose backward pass gives the parameters fresh copies of these gradients, the last one first.

    Args:
        parameters: what gets them.
        gradients: one for each.
        pauses: seconds for which the backward pass waits before each, as for an accelerator; none without it.
    """
    each = zip(parameters, gradients, pauses or [0.0] * len(parameters), strict=True)
    return torch.stack([Given.apply(parameter, [g.clone()], pause) for parameter, g, pause in each]).sum()


def make_gradients(tensors: Shapes, rank: int, noise: float = 1.0) -> Gradients:
    """Make normally distributed gradients; layers differ in scale, as in nets.

    Args:
        tensors: shapes by name.
        rank: whose gradients.
        noise: the size of the rank's own part, relative to the part that is equal on all ranks.
    """
    made = []
    for number, shape in enumerate(tensors.values()):
        common = torch.Generator().manual_seed(number)
        one = torch.randn(shape, generator=common)
        if noise:
            own = torch.Generator().manual_seed(1_000_000 * (rank + 1) + number)
            one += noise * torch.randn(shape, generator=own)
        made.append(one * (1e-2 / max(1, one[0].numel() if one.ndim else 1) ** 0.5))
    return made
