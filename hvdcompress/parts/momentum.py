"""Adapt the optimizer's momentum to gradients that error feedback delays.

A gradient that waits in a residual and is sent later acts as momentum does ("Asynchrony begets Momentum", Mitliagkas et
al. 2016, arXiv 1605.09774). With the optimizer's momentum on top, training loses accuracy. So a share c of what arrives
is handed over without momentum, and the rest as it is.

How much? Momentum μ spreads a gradient over the steps that follow. Of its whole effect, the share 1 − μ^(a+1) is
there a steps later. A gradient that arrives a steps late has that share at once if c = 1 − μ^a is handed over without
momentum. An element that last arrived w steps ago brings gradients that are 0 to w − 1 steps late, so for it::

    c = 1 − (1/w)·Σ_{a<w} μ^a = 1 − (1 − μ^w) / (w·(1 − μ))

An element that arrives in every step keeps its momentum, and one that waits long has none. If each of several ranks
selects its own elements, an element arrives when any of them sends it, and each rank's part waits longer: w is
multiplied by the number of ranks over the number of those that send an element together. Of methods that do not send
elements, ``Method.delay`` is their w. No w counts for more than 1/(1 − μ) steps, which is how far momentum reaches. So
c is at most μ^(1/(1 − μ)), about 1/e. With more, some trainings diverge.

Without momentum: an optimizer with momentum μ keeps a buffer v and applies d::

    v_t = μ·v_{t−1} + κ·u_t           d_t = v_t,   or with Nesterov's momentum   d_t = κ·u_t + μ·v_t

where u_t is the gradient that it is given. Without momentum, and at the same effective rate, it would apply

    d_t = G·s_t,        G = κ/(1 − μ)

where s_t is the reduced gradient. Solved for u_t and v_t::

    heavy ball:   v_t = G·s_t                                   u_t = (v_t − μ·v_{t−1}) / κ
    Nesterov:     v_t = (G·s_t + μ·v_{t−1}) / (1 + μ)           u_t = (v_t − μ·v_{t−1}) / κ

So v_{t−1}, which equals the optimizer's buffer, is all that is kept between steps. In PyTorch κ is 1 − dampening, but
1 in a buffer's first step; in Keras the buffer contains the learning rate, and κ is that rate. Weight decay is added to
u_t by the optimizer. As the recursion is linear, its part of the buffer keeps its momentum.

All of this is linear, so for a share c the gradient is c·s_t here, and (1 − c)·s_t is added to u_t.

Methods with a momentum m of their own (feedback "momentum", DGC) send a sum that has grown by 1/(1 − m) already. For
them c is 1, and G is κ·(1 − m)/(1 − μ).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from hvdcompress.method import Method

MOST = 100  #: steps; no wait counts for more, whatever the momentum is


class Momentum(NamedTuple):
    """The momentum that an optimizer applies to one tensor in one step.

    Attributes:
        factor: μ, in [0, 1).
        rate: κ in the steady state.
        entry: κ in this step, which differs from ``rate`` in the first step of a dampened PyTorch optimizer.
        nesterov: Whether it is Nesterov's momentum.
        updates: Number of updates of the tensor; None if that is not known.
        empty: Whether the buffer is known to contain nothing, as in a new optimizer.
    """

    factor: float
    rate: float = 1.0
    entry: float = 1.0
    nesterov: bool = False
    updates: int | None = None
    empty: bool = False


class Filter(NamedTuple):
    """Coefficients of one step, for a share c of s_t.

    v_t = gain·c·s_t + decay·v_{t−1} and u_t = (1 − c)·s_t + (v_t − factor·v_{t−1}) / entry.
    """

    gain: float
    decay: float
    factor: float
    entry: float
    keeps: bool = True
    """Whether v_t is kept for the next step; False where the method leaves the momentum as it is from now on."""
    share: float | None = 1.0
    """c; None if it goes by how long each element has waited."""


AS_IT_IS = Filter(1.0, 0.0, 0.0, 1.0)


def adapts(method: Method) -> bool:
    """Return whether the optimizer's momentum is cancelled for tensors of ``method``, wholly or in part."""
    if method.feedback == "none" or method.optimizer_momentum == "keep":
        return False
    return not _by_waits(method) or method.sparse or method.delay > 1


def _by_waits(method: Method) -> bool:
    return method.optimizer_momentum == "adapt" and method.feedback != "momentum"


@lru_cache(maxsize=64)
def shares(factor: float, spread: float) -> np.ndarray[Any, Any]:
    """Return the shares c of elements that last arrived 1, 2, … steps ago, float32; the last is that of all others.

    Args:
        factor: μ.
        spread: what waits are multiplied by, at least 1.
    """
    most = min(1.0 / (1.0 - factor), MOST)
    waits = np.minimum(spread * np.arange(1, math.ceil(most - 1e-9) + 1), most)  # 1/(1 − 0.9) is more than 10
    return (1.0 - (1.0 - factor**waits) / (waits * (1.0 - factor))).clip(0.0).astype(np.float32)


def adapting(method: Method, momentum: Momentum | None) -> Filter:
    """Return the coefficients that cancel ``momentum``; see the module's docstring.

    Args:
        method: the method of the tensor.
        momentum: the optimizer's; None if it is not known.
    """
    if momentum is None or not momentum.factor:
        return AS_IT_IS
    share: float | None = 1.0
    if _by_waits(method):
        known = shares(momentum.factor, 1.0)
        share = None if method.sparse else float(known[min(method.delay, len(known)) - 1])
    if not momentum.entry:  # a learning rate of 0: the buffer loses 1 − μ of itself, and takes nothing
        return Filter(0.0, momentum.factor, momentum.factor, 1.0, share=share)
    own = method.momentum if method.feedback == "momentum" else 0.0
    gain = momentum.rate * (1.0 - own) / (1.0 - momentum.factor)
    decay = 0.0
    if momentum.nesterov:
        gain, decay = gain / (1.0 + momentum.factor), momentum.factor / (1.0 + momentum.factor)
    return Filter(gain, decay, momentum.factor, momentum.entry, share=share)


def releasing(momentum: Momentum | None) -> Filter:
    """Return the coefficients of the step after the last cancelled one: v_t = κ·s_t, as in a new buffer."""
    if momentum is None or not momentum.entry:
        return AS_IT_IS._replace(keeps=False)
    return Filter(momentum.entry, 0.0, momentum.factor, momentum.entry, keeps=False)
