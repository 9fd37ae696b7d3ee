"""Error feedback, written once for every method: what was not sent is added to the next gradient.

"plain" (Stich et al. 2018; Karimireddy et al. 2019) and "lowpass" (ScaleCom, Chen et al. 2020, eq. 5; plain is β = 1)::

    x = gradient + residual            residual = (1 − β)·residual + β·(x − own share)

So a low-pass residual is *not* zero where x was sent, and Σ sent = Σ gradients − (residual_T − residual_0)/β.

"momentum" (Deep Gradient Compression, Lin et al. 2018, §3: momentum correction and factor masking)::

    velocity = m·velocity + gradient        x = residual + velocity        residual = x − own share
    velocity = 0 where x was sent

This is plain feedback on gradients that momentum was applied to on each rank. It replaces the optimizer's momentum.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hvdcompress.method import Array, Communication, Context, Method, Slot, TensorSpec
from hvdcompress.ops.spec import Ops

RESIDUAL = "residual"
VELOCITY = "velocity"
BUFFERED = (RESIDUAL, VELOCITY)  #: slots of the tensor's size, with a second buffer each


def names(method: Method) -> tuple[str, ...]:
    """Return the names of the slots of the method's feedback."""
    return {"none": (), "momentum": BUFFERED}.get(method.feedback, (RESIDUAL,))


def slots(method: Method, spec: TensorSpec) -> dict[str, Slot]:
    """Return all slots of one tensor under ``method``, by name: those of its feedback and its own."""
    return {**{name: Slot((spec.size,)) for name in names(method)}, **method.state(spec)}


def beta(method: Method) -> float:
    """Return the low-pass factor in use: ``method.beta`` for feedback "lowpass", else 1."""
    return method.beta if method.feedback == "lowpass" else 1.0


def exchange(
    method: Method,
    gradient: Array,
    scale: float,
    state: dict[str, Array],
    spare: dict[str, Array],
    ctx: Context,
    ops: Ops,
) -> Communication:
    """Run ``method.exchange`` with error feedback.

    The old state is never written. The new residual and velocity are built in second buffers, which the driver swaps
    in once the step is known to be good. A step with a NaN is undone exactly, by not swapping.

    Args:
        method: the method.
        gradient: this rank's gradient [n], float32 (float64 for a ``wide`` method); read only.
        scale: factor of the gradient, 1 / loss scale.
        state: current values of all slots; read only.
        spare: second buffers [n] of the feedback's slots, which receive their new values.
        ctx: rank, world, step and tensor.
        ops: the array backend.

    Yields:
        The method's collectives.

    Returns:
        The method's result, with the new values of all slots in ``state``.

    Raises:
        TypeError: the method returned no share of its own, which its feedback needs.
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
        raise TypeError(
            f"method {method.id!r} returned Reduced(own=None); feedback {method.feedback!r} needs this rank's share"
        )
    if method.feedback == "momentum":
        ops.zero_where(spare[VELOCITY], reduced.own)
    ops.subtract(x, reduced.own, 1.0)  # last, because a dense own share may be x itself
    if beta(method) != 1.0:
        ops.blend(x, residual, beta(method))
    return replace(reduced, state={**spare, **reduced.state})
