"""Adapt the optimizer's momentum to gradients that error feedback delays.

A gradient that waits in a residual and is sent later has the effect of momentum ("Asynchrony begets Momentum",
Mitliagkas et al. 2016, arXiv 1605.09774). If the optimizer adds its own momentum, training loses accuracy. Therefore a
share c of each arriving gradient is applied without momentum: its whole weight in one step, and nothing of it later.

**The share c.** Momentum μ spreads the effect of a gradient over the following steps. The share 1 − μ^(a+1) of the
whole effect has happened a steps later. A gradient that arrives a steps late catches up if the share c = 1 − μ^a is
applied without momentum. An element that was last sent w steps ago contains gradients that are 0 to w − 1 steps late,
so::

    c = 1 − (1/w)·Σ_{a<w} μ^a = 1 − (1 − μ^w) / (w·(1 − μ))

An element that is sent in every step keeps its momentum, and one that waits long has none. If several ranks select
their own elements, an element arrives when any of them sends it, although the parts of the other ranks wait longer.
Then w is multiplied by (number of ranks) / (mean number of ranks that send the same element). For methods that send all
elements, w is ``Method.delay``. w is limited to 1/(1 − μ) steps, the range of momentum, so c is at most
μ^(1/(1 − μ)), about 1/e. With larger shares some trainings diverge. For Adam and its relatives, whose steps do not grow
with the gradient, c is 1.

**In the optimizer's buffer.** An optimizer keeps a first moment v and moves the parameters by d::

    v_t = μ·v_{t−1} + κ·g_t           d_t = e·g_t + f·v_t

A gradient that is left alone contributes W·g in all steps together, W = e + f·κ/(1 − μ). To apply c·g_t at once, add
a·c·g_t to v before the step, and subtract x·c·g_t after it::

    e + f·x = q·W          x = μ·a + κ

The step then contains q·W·c·g_t, and the buffer nothing of it. q is 1, except for methods with their own momentum m
(feedback "momentum", DGC). They send a sum that is already larger by the factor 1/(1 − m), so q is 1 − m, and c is 1.

====================================  =========  ======  =====  ==========
optimizer                             κ          e       f      W
====================================  =========  ======  =====  ==========
SGD (κ = 1 − dampening)               κ          0       1      κ/(1 − μ)
SGD with Nesterov's momentum          κ          κ       μ      κ/(1 − μ)
Muon                                  1 − μ      0       1      1
Muon with Nesterov's momentum         1 − μ      1 − μ   μ      1
Adam and relatives, b = 1 − μ^t       1 − μ      0       1/b    1
====================================  =========  ======  =====  ==========

In Keras, the buffer of SGD includes the learning rate, and κ is its negative. Weight decay is not delayed, and keeps
its momentum.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from hvdcompress.method import Method

MAX_WAIT = 100  #: steps; upper limit of w for any momentum


class Moment(NamedTuple):
    """How an optimizer's first moment v turns gradients into steps: v_t = decay·v_{t−1} + rate·g_t.

    The numbers of Adam may be tensors of one element, if its step count is one on a device.

    Attributes:
        decay: μ, in [0, 1).
        rate: κ.
        direct: e, the part of the gradient that is applied without the buffer.
        buffered: f, the factor of the buffer in a step.
        weight: W, what a gradient contributes to all steps together.
        at_once: whether c is 1 for all tensors with a residual.
    """

    decay: float
    rate: Any
    direct: float
    buffered: Any
    weight: Any
    at_once: bool = False

    def changes(self, method: Method) -> tuple[Any, Any]:
        """Return a and x: the multiples of c·g to add to the buffer before a step and to subtract after it."""
        own = 1.0 - method.momentum if method.feedback == "momentum" else 1.0
        after = (own * self.weight - self.direct) / self.buffered
        return (after - self.rate) / self.decay, after


def heavy_ball(momentum: float, rate: float = 1.0, nesterov: bool = False) -> Moment:
    """Return the moment of SGD.

    Args:
        momentum: μ.
        rate: 1 − dampening in PyTorch; the negative learning rate in Keras.
        nesterov: whether it is Nesterov's momentum.
    """
    direct, buffered = (rate, momentum) if nesterov else (0.0, 1.0)
    return Moment(momentum, rate, direct, buffered, rate / (1.0 - momentum))


def average(momentum: float, nesterov: bool = False) -> Moment:
    """Return the moment of Muon: an exponential average without bias correction."""
    direct, buffered = (1.0 - momentum, momentum) if nesterov else (0.0, 1.0)
    return Moment(momentum, 1.0 - momentum, direct, buffered, 1.0)


def corrected_average(beta1: float, correction: Any) -> Moment:
    """Return the moment of Adam and its relatives, an average with bias correction.

    Args:
        beta1: μ.
        correction: b = 1 − β1^t in this step.
    """
    return Moment(beta1, 1.0 - beta1, 0.0, 1.0 / correction, 1.0, at_once=True)


def adapts(method: Method) -> bool:
    """Return whether the optimizer's momentum is adapted for tensors of ``method``."""
    if method.feedback == "none" or method.optimizer_momentum == "keep":
        return False
    return at_once(method) or method.sparse or method.delay > 1


def at_once(method: Method) -> bool:
    """Return whether c is 1 for all elements, for any optimizer."""
    return method.optimizer_momentum == "cancel" or method.feedback == "momentum"


@lru_cache(maxsize=64)
def shares(decay: float, spread: float = 1.0) -> np.ndarray[Any, Any]:
    """Return the shares c of elements by the number of steps since they were last sent, float32 [128].

    Args:
        decay: μ.
        spread: factor of w for several ranks, at least 1.
    """
    most = min(1.0 / (1.0 - decay), MAX_WAIT)
    # The tolerance corrects rounding: 1/(1 − 0.9) is slightly more than 10 in floating point
    steps = np.arange(128).clip(1, math.ceil(most - 1e-9))
    waits = np.minimum(spread * steps, most)
    return (1.0 - (1.0 - decay**waits) / (waits * (1.0 - decay))).clip(0.0).astype(np.float32)
