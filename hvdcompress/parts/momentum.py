"""Cancel the optimizer's momentum for gradients that error feedback delays.

A gradient that waits in a residual and is sent later acts as momentum does ("Asynchrony begets Momentum", Mitliagkas et
al. 2016, arXiv 1605.09774). With the optimizer's momentum on top, training loses accuracy. So the optimizer is handed
a gradient that leaves no momentum in its buffer. An optimizer with momentum μ keeps a buffer v and applies d::

    v_t = μ·v_{t−1} + κ·u_t           d_t = v_t,   or with Nesterov's momentum   d_t = κ·u_t + μ·v_t

where u_t is the gradient that it is given. Without momentum, and at the same effective rate, it would apply

    d_t = G·s_t,        G = κ/(1 − μ)

where s_t is the reduced gradient. Solved for u_t and v_t::

    heavy ball:   v_t = G·s_t                                   u_t = (v_t − μ·v_{t−1}) / κ
    Nesterov:     v_t = (G·s_t + μ·v_{t−1}) / (1 + μ)           u_t = (v_t − μ·v_{t−1}) / κ

So v_{t−1}, which equals the optimizer's buffer, is all that is kept between steps. In PyTorch κ is 1 − dampening, but
1 in a buffer's first step; in Keras the buffer contains the learning rate, and κ is that rate. Weight decay is added to
u_t by the optimizer. As the recursion is linear, its part of the buffer keeps its momentum.

Methods with a momentum m of their own (feedback "momentum", DGC) send a sum that has grown by 1/(1 − m) already. For
them G is κ·(1 − m)/(1 − μ).
"""

from __future__ import annotations

from typing import NamedTuple

from hvdcompress.method import Method


class Momentum(NamedTuple):
    """The momentum that an optimizer applies to one tensor in one step.

    Attributes:
        factor: μ, in [0, 1).
        rate: κ in the steady state.
        entry: κ in this step, which differs from ``rate`` in the first step of a dampened PyTorch optimizer.
        nesterov: Whether it is Nesterov's momentum.
        updates: Number of updates that the optimizer has done; None if that is not known.
        empty: Whether the buffer is known to contain nothing, as in a new optimizer.
    """

    factor: float
    rate: float = 1.0
    entry: float = 1.0
    nesterov: bool = False
    updates: int | None = None
    empty: bool = False


class Filter(NamedTuple):
    """Coefficients of one step: v_t = gain·s_t + decay·v_{t−1} and u_t = (v_t − factor·v_{t−1}) / entry."""

    gain: float
    decay: float
    factor: float
    entry: float
    keeps: bool = True
    """Whether v_t is kept for the next step; False where the method leaves the momentum as it is from now on."""


AS_IT_IS = Filter(1.0, 0.0, 0.0, 1.0)


def cancels(method: Method) -> bool:
    """Return whether the optimizer's momentum is cancelled for tensors of ``method``."""
    return method.optimizer_momentum == "cancel" and method.feedback != "none"


def cancelling(method: Method, momentum: Momentum | None) -> Filter:
    """Return the coefficients that cancel ``momentum``; see the module's docstring.

    Args:
        method: the method of the tensor.
        momentum: the optimizer's; None if it is not known.
    """
    if momentum is None or not momentum.factor:
        return AS_IT_IS
    if not momentum.entry:  # a learning rate of 0: the buffer loses 1 − μ of itself, and takes nothing
        return Filter(0.0, momentum.factor, momentum.factor, 1.0)
    own = method.momentum if method.feedback == "momentum" else 0.0
    gain = momentum.rate * (1.0 - own) / (1.0 - momentum.factor)
    decay = 0.0
    if momentum.nesterov:
        gain, decay = gain / (1.0 + momentum.factor), momentum.factor / (1.0 + momentum.factor)
    return Filter(gain, decay, momentum.factor, momentum.entry)


def releasing(momentum: Momentum | None) -> Filter:
    """Return the coefficients of the step after the last cancelled one: v_t = κ·s_t, as in a new buffer."""
    if momentum is None or not momentum.entry:
        return AS_IT_IS._replace(keeps=False)
    return Filter(momentum.entry, 0.0, momentum.factor, momentum.entry, keeps=False)
