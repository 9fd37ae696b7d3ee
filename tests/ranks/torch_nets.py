"""Shared by the tests of PyTorch: a net whose backward pass fails, and checks of a momentum buffer."""

from __future__ import annotations

import numpy as np
import torch

#: With these settings, all elements are sent, and the momentum buffer holds the gradient at the effective learning
#: rate: with momentum 0.9, ten times the last gradient.
CANCELLED = {"density": 1.0, "min_elements": 1, "optimizer_momentum": "cancel"}


def assert_momentum_buffer(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, want: float, what: str) -> None:
    """Check that all elements of a parameter's momentum buffer have this value."""
    np.testing.assert_allclose(optimizer.state[parameter]["momentum_buffer"], want, rtol=1e-4, err_msg=what)


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
