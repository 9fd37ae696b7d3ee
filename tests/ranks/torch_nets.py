"""Shared by the tests of PyTorch: nets with unusual backward passes, and checks of a momentum buffer."""

from __future__ import annotations

from functools import partial
from itertools import groupby

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

#: With these settings, all elements are sent, and a step contains the gradient at the effective learning rate: with
#: momentum 0.9, ten times the gradient. Nothing of it stays in the momentum buffer.
CANCELLED = {"density": 1.0, "min_elements": 1, "optimizer_momentum": "cancel"}


def assert_momentum_buffer(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, want: float, what: str) -> None:
    """Check that all elements of a parameter's momentum buffer have this value."""
    np.testing.assert_allclose(optimizer.state[parameter]["momentum_buffer"], want, rtol=1e-4, atol=1e-4, err_msg=what)


class RaiseInBackward(torch.autograd.Function):
    """The identity, whose backward pass raises the given error, if any."""

    @staticmethod
    def forward(ctx, x, error):
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.error:
            raise ctx.error
        return gradient, None


class TwoLayers(torch.nn.Module):
    """Two layers. The backward pass can raise an error between them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(40, 50), torch.nn.Linear(50, 40)

    def forward(self, x, error=None):
        return self.second(RaiseInBackward.apply(self.first(x), error)).sum()


class InnerBackward(torch.autograd.Function):
    """Runs a block again in its backward pass, and a backward pass through it, as reversible nets do."""

    @staticmethod
    def forward(ctx, block, x):
        ctx.block, ctx.x = block, x.detach().requires_grad_()
        return block(x)

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            ctx.block(ctx.x).backward(gradient)
        return None, ctx.x.grad


NESTED = {"checkpoint": partial(checkpoint, use_reentrant=True), "function": InnerBackward.apply}


class Nested(torch.nn.Module):
    """Layers of which some have their backward pass inside of another one.

    Args:
        kind: a key of ``NESTED``.
        levels: for each layer, how many backward passes are around its own.

    Attributes:
        error: raised when the first layer runs.
    """

    def __init__(self, kind, levels):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(40, 40) for _ in levels)
        self.nested, self.levels, self.error = NESTED[kind], levels, None

    def forward(self, x):
        for level, group in groupby(range(len(self.levels)), lambda number: int(self.levels[number])):
            block = partial(self.run, list(group))
            for _ in range(level):
                block = partial(self.nested, block)
            x = block(x)
        return x

    def run(self, numbers, x):
        if self.error and 0 in numbers:
            raise self.error
        for number in numbers:
            x = self.layers[number](x)
        return x


def gradients_of_nested(rank, kind, levels, compress):
    """Return the reduced gradients of three steps.

    ``compress`` takes the net. It returns the model to run, and a function that ends a step and returns the parameters'
    gradients.
    """
    torch.manual_seed(0)
    model, finish = compress(Nested(kind, levels))
    found = []
    for step in range(3):
        model.zero_grad()
        x = torch.randn(3, 40, generator=torch.Generator().manual_seed(10 * step + rank))
        model(x.requires_grad_()).square().sum().backward()
        found.append([gradient.clone() for gradient in finish()])
    return found
