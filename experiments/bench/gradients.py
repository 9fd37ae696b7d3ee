"""Gradients to measure with: random numbers of given shapes, and a backward pass that hands out prepared gradients."""

from __future__ import annotations

from typing import Any

import torch

from experiments.nets import Shapes

Gradients = list[torch.Tensor]


class Given(torch.autograd.Function):
    """A parameter's part in the loss: its gradient is taken out of a box."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, box: Gradients) -> torch.Tensor:
        ctx.box = box
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.box.pop(), None  # nobody else holds it, so autograd makes it `.grad` without a copy


def loss(parameters: list[torch.nn.Parameter], gradients: Gradients) -> torch.Tensor:
    """Return a loss whose backward pass gives the parameters fresh copies of these gradients, the last one first."""
    each = zip(parameters, gradients, strict=True)
    return torch.stack([Given.apply(parameter, [gradient.clone()]) for parameter, gradient in each]).sum()  # type: ignore[no-untyped-call]


def make_gradients(tensors: Shapes, rank: int, noise: float = 1.0) -> Gradients:
    """Return normally distributed gradients of a rank; layers differ in scale, as in nets.

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
