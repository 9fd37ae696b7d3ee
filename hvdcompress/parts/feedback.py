"""Error feedback, written once for every method: what was not sent is added to the next gradient.

"plain" (Stich et al. 2018; Karimireddy et al. 2019) and "lowpass" (ScaleCom, Chen et al. 2020, eq. 5; plain is β = 1)::

    x = gradient + residual            residual = (1 − β)·residual + β·(x − own share)

So a low-pass residual is *not* zero where x was sent, and Σ sent = Σ gradients − (residual_T − residual_0)/β.

"momentum" (Deep Gradient Compression, Lin et al. 2018, §3: momentum correction and factor masking)::

    velocity = m·velocity + gradient        x = residual + velocity        residual = x − own share
    velocity = 0 where x was sent

This is plain feedback on gradients that momentum was applied to on each rank. It replaces the optimizer's momentum.

``local_clip_norm``, with any of them, bounds what a step can add to a residual (local gradient clipping, Lin et al.,
§3.2)::

    gradient = gradient · min(1, local_clip_norm/√p / ‖gradient‖)

Clipping what has been exchanged, as an optimizer does, cannot: elements that were not sent wait in the residual with
the size that they came with. The norm is that of the *tensor*, since a backward pass hands out tensors one by one, and
the first are on their way before the last are known. It takes one more pass over the gradient, and on a device the
host waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hvdcompress.method import Array, Communication, Context, Method, Slot, TensorSpec
from hvdcompress.ops.scan import NOTHING, Found, Span, Velocity
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


def clipping(method: Method, gradient: Array, scale: float, ctx: Context, ops: Ops) -> float:
    """Return the factor of a tensor's local gradient: ``scale``, or less if ``method.local_clip_norm`` asks for it.

    Args:
        method: the method.
        gradient: this rank's gradient of one tensor [n], still multiplied by the loss scale; read only.
        scale: 1 / loss scale.
        ctx: rank, world, step and tensor.
        ops: the array backend.
    """
    if method.local_clip_norm is None or not (norm := ops.l2_norm(gradient)):
        return scale
    # the backends' float64 sums differ in their last bits; rounded to float32 they agree
    return float(np.float32(min(scale, method.local_clip_norm / math.sqrt(ctx.world) / norm)))


def receive(
    method: Method,
    gradients: Sequence[Array],
    scale: float,
    places: Sequence[int] | None,
    spans: Sequence[Span],
    state: dict[str, Array],
    spare: dict[str, Array],
    ctx: Context,
    ops: Ops,
    clear: bool = False,
) -> list[Found]:
    """Add tensors' gradients and residuals: the one pass over memory that each gradient makes.

    The old state is never written. The new residual and velocity are built in second buffers, which the driver swaps
    in once the step is known to be good. A step with a NaN is undone exactly, by not swapping.

    A gradient that would make an Inf or a NaN of x counts as zeros, so that no method ever sees one in x. On a device,
    for whose answer nobody waits here, the caller does that with ``ops.keep_if``. What ``method.scan`` found stays
    then: its sizes are right, and the step is undone.

    Args:
        method: the method; its feedback is not "none".
        gradients: this rank's gradients of the tensors, float32.
        scale: factor of the gradients, 1 / loss scale.
        places: which parts of the vectors of state and spare the tensors are; None: each is several, and not scanned.
        spans: where they are.
        state: current values of all slots; read only.
        spare: second buffers [n] of the feedback's slots, which receive their new values.
        ctx: rank, world, step and tensor.
        ops: the array backend.
        clear: set each gradient to 0 once it has been read.

    Returns:
        Of each, what ``method.scan`` asked for, and whether x is finite with it (``ops.vectors.Flag``).
    """
    x, residual, velocity = spare[RESIDUAL], state[RESIDUAL], None
    if places is None:
        scans = [NOTHING] * len(gradients)
    else:
        scans = [method.scan(place, ctx, ops, each) for place, each in zip(places, gradients, strict=True)]
    factors = [clipping(method, gradient, scale, ctx, ops) for gradient in gradients]
    if method.feedback == "momentum":
        velocity = Velocity(state[VELOCITY], spare[VELOCITY], method.momentum)
    founds = ops.accumulate_parts(gradients, residual, factors, x, spans, scans, clear, velocity)
    for number, (found, (start, stop), scan) in enumerate(zip(founds, spans, scans, strict=True)):
        if found.finite is False:
            zeros = ops.zeros(stop - start, "float32", like=x)
            (undone,) = ops.accumulate_parts([zeros], residual, [1.0], x, [(start, stop)], [scan], velocity=velocity)
            founds[number] = undone._replace(finite=False)
    return founds


def exchange(
    method: Method, x: Array, state: dict[str, Array], spare: dict[str, Array], ctx: Context, ops: Ops
) -> Communication:
    """Run ``method.exchange`` with error feedback, once all parts of x are there.

    Args:
        method: the method.
        x: what is exchanged: ``spare["residual"]`` after :func:`receive`; without feedback the gradient.
        state: current values of all slots; read only.
        spare: second buffers [n] of the feedback's slots.
        ctx: rank, world, step and tensor.
        ops: the array backend.

    Yields:
        The method's collectives.

    Returns:
        The method's result, with the new values of all slots in ``state``.

    Raises:
        TypeError: the method returned no share of its own, which its feedback needs.
    """
    reduced = yield from method.exchange(x, state, ctx, ops)
    if method.feedback == "none":
        return reduced
    if reduced.own is None:
        raise TypeError(
            f"method {method.id!r} returned Reduced(own=None); feedback {method.feedback!r} needs this rank's share"
        )
    if method.feedback == "momentum":
        ops.zero_where(spare[VELOCITY], reduced.own)
    ops.subtract(x, reduced.own, 1.0)  # last, because a dense own share may be x itself
    if beta(method) != 1.0:
        ops.blend(x, state[RESIDUAL], beta(method))
    return replace(reduced, state={**spare, **reduced.state})
