"""Error feedback, once for every method: what was not sent is added to the next gradient.

Plain (Stich et al. 2018; Karimireddy et al. 2019)::

    x = gradient + residual            residual = x − own share

Low-pass (ScaleCom, Chen et al. 2020, eq. 5), of which plain is β = 1::

    residual = (1 − β)·residual + β·(x − own share)

At sent places the low-pass residual is therefore (1 − β) of what it was, *not* zero, and
Σ sent = Σ gradients − (residual_T − residual_0)/β.

Momentum (Deep Gradient Compression, Lin et al. 2018, §3: momentum correction and factor masking)::

    velocity = m·velocity + gradient        x = residual + velocity        residual = x − own share
    velocity = 0 at sent places

It is plain feedback on gradients that went through momentum first, on each rank: what waits in the residual
is then what plain momentum would have made of it. It replaces the optimizer's own momentum.

Old slots are never written: new ones are built in second buffers and the driver swaps them when the step is
known to be good. A step that meets a NaN is then undone exactly, by not swapping.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from hvdcompress.method import Array, Communication, Context, Method, Slot, TensorSpec

RESIDUAL = "residual"
VELOCITY = "velocity"
BUFFERED = (RESIDUAL, VELOCITY)  #: slots of a tensor's own shape that have a second buffer


def names(method: Method) -> tuple[str, ...]:
    """The slots that the method's feedback keeps."""
    return {"none": (), "momentum": BUFFERED}.get(method.feedback, (RESIDUAL,))


def slots(method: Method, spec: TensorSpec) -> dict[str, Slot]:
    """All state of one tensor under ``method``: its feedback's slots and its own."""
    return {**{name: Slot((spec.size,)) for name in names(method)}, **method.state(spec)}


def beta(method: Method) -> float:
    """The low-pass factor in force; 1 but for feedback "lowpass"."""
    return method.beta if method.feedback == "lowpass" else 1.0


def exchange(
    method: Method,
    gradient: Array,
    scale: float,
    state: dict[str, Array],
    spare: dict[str, Array],
    ctx: Context,
    ops: Any,
) -> Communication:
    """``method.exchange`` on what the feedback makes of ``scale·gradient``, the feedback's slots brought up to date.

    ``gradient`` [n] in the working dtype and ``state`` are read only; the arrays [n] of ``spare`` receive the new
    slots. Returns a ``Reduced`` whose ``state`` holds every slot's new value.
    """
    scale = method.clip(gradient, scale, ctx, ops)
    if method.feedback == "none":
        x = gradient if scale == 1.0 else gradient * np.float32(scale)
        return (yield from method.exchange(x, state, replace(ctx, needs_own=False), ops))
    x, residual = spare[RESIDUAL], state[RESIDUAL]
    if method.feedback == "momentum":
        gradient = gradient if scale == 1.0 else gradient * np.float32(scale)
        ops.accumulate(state[VELOCITY], gradient, method.momentum, spare[VELOCITY])
        scanned = method.scan(spare[VELOCITY], residual, 1.0, x, ops)
    else:
        scanned = method.scan(gradient, residual, scale, x, ops)
    reduced = yield from method.exchange(x, state, replace(ctx, scanned=scanned), ops)
    if reduced.own is None:
        raise TypeError(f"method {method.id!r} returned no own share, which feedback {method.feedback!r} needs")
    if method.feedback == "momentum":
        ops.zero_where(spare[VELOCITY], reduced.own)
    ops.subtract(x, reduced.own, 1.0)  # last, as a dense own share may be x itself
    if beta(method) != 1.0:
        ops.blend(x, residual, beta(method))
    return replace(reduced, state={**spare, **reduced.state})
