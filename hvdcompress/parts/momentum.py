"""Adapt the optimizer's momentum to gradients that error feedback delays.

A gradient that waits in a residual and is sent later has the effect of momentum ("Asynchrony begets Momentum",
Mitliagkas et al. 2016, arXiv 1605.09774). If the optimizer adds its own momentum, training loses accuracy. Therefore a
share c of each arriving gradient is delivered without momentum, and the rest unchanged.

**The share c.** Momentum μ spreads the effect of a gradient over the following steps. The share 1 − μ^(a+1) of the
whole effect has happened a steps later. A gradient that arrives a steps late catches up if the share c = 1 − μ^a is
delivered without momentum. An element that was last sent w steps ago contains gradients that are 0 to w − 1 steps late,
so::

    c = 1 − (1/w)·Σ_{a<w} μ^a = 1 − (1 − μ^w) / (w·(1 − μ))

An element that is sent in every step keeps its momentum, and one that waits long has none. If several ranks select
their own elements, an element arrives when any of them sends it, although the parts of the other ranks wait longer.
Then w is multiplied by (number of ranks) / (mean number of ranks that send the same element). For methods that send all
elements, w is ``Method.delay``. w is limited to 1/(1 − μ) steps, the range of momentum, so c is at most
μ^(1/(1 − μ)), about 1/e. With larger shares some trainings diverge.

**Without momentum.** An optimizer with momentum μ keeps a buffer v and applies d::

    v_t = μ·v_{t−1} + κ·u_t           d_t = v_t,   or with Nesterov's momentum   d_t = κ·u_t + μ·v_t

where u_t is the gradient that it receives. Without momentum, at the same effective learning rate, it would apply

    d_t = G·s_t,        G = κ/(1 − μ)

where s_t is the reduced gradient. Solving for u_t and v_t gives::

    heavy ball:   v_t = G·s_t                                   u_t = (v_t − μ·v_{t−1}) / κ
    Nesterov:     v_t = (G·s_t + μ·v_{t−1}) / (1 + μ)           u_t = (v_t − μ·v_{t−1}) / κ

So v_{t−1}, which equals the optimizer's buffer, is the only state. In PyTorch κ is 1 − dampening, except that it is 1
in the first step of a buffer. In Keras the buffer includes the learning rate, and κ is that rate. The optimizer adds
weight decay to u_t; because the recursion is linear, the contribution of weight decay to the buffer keeps its momentum.

The equations are linear, so for a share c they apply to c·s_t, and (1 − c)·s_t is added to u_t.

Methods with their own momentum m (feedback "momentum", DGC) send a sum that is already larger by the factor 1/(1 − m).
For them c is 1, and G is κ·(1 − m)/(1 − μ).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from hvdcompress.method import Method

MAX_WAIT = 100  #: steps; upper limit of w for any momentum


class Momentum(NamedTuple):
    """The momentum that an optimizer applies to one tensor in one step.

    Attributes:
        factor: μ, in [0, 1).
        rate: κ in the steady state.
        entry: κ in this step. It differs from ``rate`` in the first step of a dampened PyTorch optimizer.
        nesterov: whether it is Nesterov's momentum.
        updates: number of updates of the tensor so far; None if unknown.
        empty: whether the buffer is known to be zero, as in a new optimizer.
    """

    factor: float
    rate: float = 1.0
    entry: float = 1.0
    nesterov: bool = False
    updates: int | None = None
    empty: bool = False


class Filter(NamedTuple):
    """Coefficients of one step for a share c of s_t.

    v_t = gain·c·s_t + decay·v_{t−1} and u_t = (1 − c)·s_t + (v_t − factor·v_{t−1}) / entry.
    """

    gain: float
    decay: float
    factor: float
    entry: float
    keeps: bool = True
    """Whether v_t is kept for the next step. False if the method stops adapting momentum."""
    share: float | None = 1.0
    """The share c; None if each element has its own share, depending on how long it has waited."""


AS_IT_IS = Filter(1.0, 0.0, 0.0, 1.0)


def adapts(method: Method) -> bool:
    """Return whether the optimizer's momentum is adapted for tensors of ``method``."""
    if method.feedback == "none" or method.optimizer_momentum == "keep":
        return False
    return not _by_waits(method) or method.sparse or method.delay > 1


def _by_waits(method: Method) -> bool:
    return method.optimizer_momentum == "adapt" and method.feedback != "momentum"


@lru_cache(maxsize=64)
def shares(factor: float, spread: float) -> np.ndarray[Any, Any]:
    """Return the shares c of elements that were last sent 1, 2, … steps ago; the last is for all older ones.

    Args:
        factor: μ.
        spread: factor of w for several ranks, at least 1.

    Returns:
        float32, one share per step up to the limit of w.
    """
    most = min(1.0 / (1.0 - factor), MAX_WAIT)
    # The tolerance corrects rounding: 1/(1 − 0.9) is slightly more than 10 in floating point
    waits = np.minimum(spread * np.arange(1, math.ceil(most - 1e-9) + 1), most)
    return (1.0 - (1.0 - factor**waits) / (waits * (1.0 - factor))).clip(0.0).astype(np.float32)


def cancelling_filter(method: Method, momentum: Momentum | None) -> Filter:
    """Return the coefficients that cancel momentum, wholly or in part; see the module's docstring.

    Args:
        method: the method of the tensor.
        momentum: the optimizer's momentum; None if unknown.
    """
    if momentum is None or not momentum.factor:
        return AS_IT_IS
    share: float | None = 1.0
    if _by_waits(method):
        known = shares(momentum.factor, 1.0)
        share = None if method.sparse else float(known[min(method.delay, len(known)) - 1])
    if not momentum.entry:  # with a learning rate of 0, the buffer decays by μ and takes up nothing
        return Filter(0.0, momentum.factor, momentum.factor, 1.0, share=share)
    own = method.momentum if method.feedback == "momentum" else 0.0
    gain = momentum.rate * (1.0 - own) / (1.0 - momentum.factor)
    decay = 0.0
    if momentum.nesterov:
        gain /= 1.0 + momentum.factor
        decay = momentum.factor / (1.0 + momentum.factor)
    return Filter(gain, decay, momentum.factor, momentum.entry, share=share)


def restoring_filter(momentum: Momentum | None) -> Filter:
    """Return the coefficients of the first step without adaptation: v_t = κ·s_t, as in a new buffer."""
    if momentum is None or not momentum.entry:
        return AS_IT_IS._replace(keeps=False)
    return Filter(momentum.entry, 0.0, momentum.factor, momentum.entry, keeps=False)
