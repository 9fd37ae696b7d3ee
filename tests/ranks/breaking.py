"""A net whose backward pass fails where it is asked to."""

from __future__ import annotations

import torch


class Breaks(torch.autograd.Function):
    """The identity; its backward pass raises what it is given, if anything."""

    @staticmethod
    def forward(ctx, x, raised):
        ctx.raised = raised
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.raised:
            raise ctx.raised
        return gradient, None


class Two(torch.nn.Module):
    """Two layers, between which the backward pass raises."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(40, 50), torch.nn.Linear(50, 40)

    def forward(self, x, raised=None):
        return self.second(Breaks.apply(self.first(x), raised)).sum()
