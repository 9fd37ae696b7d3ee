"""Error feedback, once for every method: what was not sent is added to the next gradient.

Plain (Stich et al. 2018; Karimireddy et al. 2019)::

    x = gradient + residual            residual = x − own share

Low-pass (ScaleCom, Chen et al. 2020, eq. 5), of which plain is β = 1::

    residual = (1 − β)·residual + β·(x − own share)

At sent places the low-pass residual is therefore (1 − β) of what it was, *not* zero, and
Σ sent = Σ gradients − (residual_T − residual_0)/β.

The old residual is never written: the new one is built in a second buffer and the driver swaps the
two when the step is known to be good. A step that meets a NaN is then undone exactly, by not swapping.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from hvdcompress.method import Array, Exchange, Method, Slot, TensorSpec, Turn

RESIDUAL = "residual"


def slots(method: Method, spec: TensorSpec) -> dict[str, Slot]:
    """All state of one tensor under ``method``: its own slots and, with feedback, the residual."""
    own = method.state(spec)
    if method.feedback != "none":
        own = {RESIDUAL: Slot((spec.size,)), **own}
    return own


def beta(method: Method) -> float:
    """The low-pass factor in force; 1 but for feedback "lowpass"."""
    return method.beta if method.feedback == "lowpass" else 1.0


def exchange(
    method: Method, gradient: Array, scale: float, state: dict[str, Array], spare: Array, me: Turn, ops: Any
) -> Exchange:
    """``method.exchange`` on ``scale·gradient + residual``, the residual brought up to date.

    ``gradient`` [n] in the working dtype and ``state`` are read only; ``spare`` [n] receives the new
    residual. Returns a ``Reduced`` whose ``state`` holds every slot's new value.
    """
    if method.feedback == "none":
        x = gradient if scale == 1.0 else gradient * np.float32(scale)
        return (yield from method.exchange(x, state, me, ops))
    residual = state[RESIDUAL]
    seen = method.scan(gradient, residual, scale, spare, ops)
    reduced = yield from method.exchange(spare, state, replace(me, seen=seen), ops)
    if reduced.own is None:
        raise TypeError(f"method {method.id!r} returned no own share, which feedback {method.feedback!r} needs")
    ops.subtract(spare, reduced.own, 1.0)  # first, as a dense own share may be x itself
    if beta(method) != 1.0:
        ops.blend(spare, residual, beta(method))
    return replace(reduced, state={RESIDUAL: spare, **reduced.state})
