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
from dataclasses import dataclass, replace

import numpy as np

from hvdcompress.method import Array, Communication, Context, Method, Slot, TensorSpec, Workspace
from hvdcompress.ops.scan import NOTHING, Found, Span, Velocity

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


def clipping(method: Method, gradient: Array, scale: float, ctx: Context, work: Workspace) -> float:
    """Return the factor of a tensor's local gradient: ``scale``, or less if ``method.local_clip_norm`` asks for it.

    Args:
        method: the method.
        gradient: this rank's gradient of one tensor [n], still multiplied by the loss scale; read only.
        scale: 1 / loss scale.
        ctx: rank, world, step and tensor.
        work: the array ops.
    """
    if method.local_clip_norm is None or not (norm := work.ops.l2_norm(gradient)):
        return scale
    # the backends' float64 sums differ in their last bits; rounded to float32 they agree
    return float(np.float32(min(scale, method.local_clip_norm / math.sqrt(ctx.world) / norm)))


@dataclass(slots=True, eq=False)
class Feedback:
    """The feedback of one exchange: the slots before it, and where their new values are built.

    The old state is never written. The new residual and velocity are built in second buffers, which the driver swaps
    in once the step is known to be good. A step with a NaN is undone exactly, by not swapping.

    Attributes:
        method: the method.
        state: current values of all slots, those of the method's own included; read only.
        spare: second buffers [n] of the feedback's slots, which receive their new values.
        scale: factor of the gradients, 1 / loss scale.
    """

    method: Method
    state: dict[str, Array]
    spare: dict[str, Array]
    scale: float = 1.0

    def receive(
        self,
        gradients: Sequence[Array],
        indices: Sequence[int] | None,
        spans: Sequence[Span],
        ctx: Context,
        work: Workspace,
    ) -> list[Found]:
        """Add tensors' gradients and residuals: the one pass over memory that each gradient makes.

        The feedback of the method is not "none".

        A gradient that would make an Inf or a NaN of x counts as zeros, so that no method ever sees one in x. On a
        device, for whose answer nobody waits here, the caller does that with ``ops.keep_if``. What ``method.scan``
        found stays then: its sizes are right, and the step is undone.

        Args:
            gradients: this rank's gradients of the tensors, float32.
            indices: which parts of the slots' vectors the tensors are; None: each is several, and not scanned.
            spans: (start, stop) of the tensors in these vectors.
            ctx: rank, world, step and tensor.
            work: memory, findings and counters of this exchange, and the array ops.

        Returns:
            Of each, what ``method.scan`` asked for, and whether x is finite with it (``ops.vectors.Flag``).
        """
        ops, method, state = work.ops, self.method, self.state
        x, residual, velocity = self.spare[RESIDUAL], state[RESIDUAL], None
        if indices is None:
            scans = [NOTHING] * len(gradients)
        else:
            scans = [
                method.scan(index, state, ctx, work, gradient)
                for index, gradient in zip(indices, gradients, strict=True)
            ]
        factors = [clipping(method, gradient, self.scale, ctx, work) for gradient in gradients]
        if method.feedback == "momentum":
            velocity = Velocity(state[VELOCITY], self.spare[VELOCITY], method.momentum)
        founds = ops.accumulate_parts(gradients, residual, factors, x, spans, scans, velocity)
        for number, (found, (start, stop), scan) in enumerate(zip(founds, spans, scans, strict=True)):
            if found.finite is False:
                zeros = ops.zeros(stop - start, "float32", like=x)
                (undone,) = ops.accumulate_parts(
                    [zeros], residual, [1.0], x, [(start, stop)], [scan], velocity=velocity
                )
                founds[number] = undone._replace(finite=False)
        return founds

    def exchange(self, x: Array, ctx: Context, work: Workspace) -> Communication:
        """Run ``method.exchange`` with error feedback, once all parts of x are there.

        Args:
            x: what is exchanged: ``spare["residual"]`` after :meth:`receive`; without feedback the gradient.
            ctx: rank, world, step and tensor.
            work: memory, findings and counters of this exchange, and the array ops.

        Yields:
            The method's collectives.

        Returns:
            The method's result, with the new values of all slots in ``state``.

        Raises:
            TypeError: the method returned no share of its own, which its feedback needs.
        """
        ops, method = work.ops, self.method
        reduced = yield from method.exchange(x, self.state, ctx, work)
        if method.feedback == "none":
            return reduced
        if reduced.own is None:
            raise TypeError(
                f"method {method.id!r} returned Reduced(own=None); feedback {method.feedback!r} needs this rank's share"
            )
        if method.feedback == "momentum":
            ops.zero_where(self.spare[VELOCITY], reduced.own)
        ops.subtract(x, reduced.own, 1.0)  # last, because a dense own share may be x itself
        if beta(method) != 1.0:
            ops.blend(x, self.state[RESIDUAL], beta(method))
        return replace(reduced, state={**self.spare, **reduced.state})
