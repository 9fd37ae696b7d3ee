"""Error feedback for every method: the part of the gradient that was not sent is added to the next gradient.

"plain" (Stich et al. 2018; Karimireddy et al. 2019) and "lowpass" (ScaleCom, Chen et al. 2020, eq. 5; plain is β = 1)::

    x = gradient + residual            residual = (1 − β)·residual + β·(x − own share)

So a low-pass residual is *not* zero at sent elements, and Σ sent = Σ gradients − (residual_T − residual_0)/β.

"momentum" (Deep Gradient Compression, Lin et al. 2018, §3: momentum correction and factor masking)::

    velocity = m·velocity + gradient        x = residual + velocity        residual = x − own share
    velocity = 0 at sent elements

This is plain feedback on gradients to which each rank applies momentum. It replaces the momentum of the optimizer.

``local_clip_norm``, with any of them, limits what a step can add to a residual (local gradient clipping, Lin et al.,
§3.2)::

    gradient = gradient · min(1, local_clip_norm/√p / ‖gradient‖)

Clipping the exchanged gradient, as an optimizer does, has a different effect: elements that were not sent remain in the
residual with their original size. The norm is that of a *tensor*, not of all tensors, because the backward pass
produces gradients one by one, and the first are sent before the last are known. Clipping takes one more pass over the
gradient, and on a device it synchronises with the host.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hvdcompress.method import Array, Communication, Context, Method, Reduced, Slot, TensorSpec, Workspace
from hvdcompress.ops.scan import NOTHING, Found, Span, Velocity

RESIDUAL = "residual"
VELOCITY = "velocity"
BUFFERED = (RESIDUAL, VELOCITY)  #: slots with the size of the tensor, which have a second buffer each


def slot_names(method: Method) -> tuple[str, ...]:
    """Return the names of the slots that the method's error feedback uses."""
    return {"none": (), "momentum": BUFFERED}.get(method.feedback, (RESIDUAL,))


def slots(method: Method, spec: TensorSpec) -> dict[str, Slot]:
    """Return {name: slot} of one tensor under ``method``: the slots of its feedback and its own.

    Raises:
        ValueError: a slot of the method has the name of a slot of its feedback.
    """
    names = slot_names(method)
    own = method.state(spec)
    for name in names:
        if name in own:
            raise ValueError(f"the slot {name!r} of method {method.id!r} has the name of its error feedback's slot")
    return {**{name: Slot((spec.size,)) for name in names}, **own}


def beta(method: Method) -> float:
    """Return the effective low-pass factor: ``method.beta`` for feedback "lowpass", otherwise 1."""
    return method.beta if method.feedback == "lowpass" else 1.0


def clipping(method: Method, gradient: Array, scale: float, ctx: Context, work: Workspace) -> float:
    """Return the factor of a local gradient: ``scale``, or less if ``method.local_clip_norm`` requires it.

    Args:
        method: the method.
        gradient: this rank's gradient of one tensor [n], multiplied by the loss scale; read only.
        scale: 1 / loss scale.
        ctx: rank, world_size, step and tensor.
        work: the array ops.
    """
    if method.local_clip_norm is None or not (norm := work.ops.l2_norm(gradient)):
        return scale
    # The float64 norms of the backends differ in their last bits; rounded to float32 they agree
    return float(np.float32(min(scale, method.local_clip_norm / math.sqrt(ctx.world_size) / norm)))


@dataclass(slots=True, eq=False)
class Feedback:
    """Error feedback of one exchange.

    The old state is never written. The new residual and velocity are written to second buffers, which replace the old
    ones only if the step is committed. So a step with a NaN is undone exactly, by not replacing anything.

    Attributes:
        method: the method.
        state: current values of all slots, including the method's own; read only.
        spare: second buffers [n], which receive the new values of the feedback's slots.
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
        """Add gradients and residuals, in the one pass over memory that each gradient makes.

        Only for methods with a feedback other than "none".

        A gradient that would put an Inf or a NaN into x counts as zeros, so that methods never see one. On a device
        nobody waits for this check here; the caller applies ``ops.keep_if`` instead. The results of ``method.scan`` are
        then those of the gradient: their sizes are right, and the step will be undone.

        Args:
            gradients: this rank's gradients of the tensors, float32.
            indices: indices of the tensors among the parts of the vector. None: each gradient covers several parts, and
                is not scanned.
            spans: (start, stop) of the tensors in the vector.
            ctx: rank, world_size, step and tensor.
            work: buffers, scan results and counters of this exchange, and the array ops.

        Returns:
            For each tensor, the result of ``method.scan``, and whether x is finite (``ops.vectors.Flag``).
        """
        ops = work.ops
        method = self.method
        state = self.state
        x = self.spare[RESIDUAL]
        residual = state[RESIDUAL]
        scans = [NOTHING] * len(gradients)
        if indices is not None:
            parts = zip(indices, gradients, strict=True)
            scans = [method.scan(index, state, ctx, work, gradient) for index, gradient in parts]
        factors = [clipping(method, gradient, self.scale, ctx, work) for gradient in gradients]
        velocity = None
        if method.feedback == "momentum":
            velocity = Velocity(state[VELOCITY], self.spare[VELOCITY], method.momentum)
        founds = ops.accumulate_parts(gradients, residual, factors, x, spans, scans, velocity)
        for number, (found, (start, stop), scan) in enumerate(zip(founds, spans, scans, strict=True)):
            if found.finite is False:
                # Add zeros instead, so that x is the old residual
                zeros = ops.zeros(stop - start, "float32", like=x)
                (undone,) = ops.accumulate_parts(
                    [zeros], residual, [1.0], x, [(start, stop)], [scan], velocity=velocity
                )
                founds[number] = undone._replace(finite=False)
        return founds

    def exchange(self, x: Array, ctx: Context, work: Workspace) -> Communication:
        """Run ``method.exchange`` with error feedback, after all gradients were received.

        Args:
            x: the vector to exchange: ``spare["residual"]`` after :meth:`receive`; without feedback the gradient.
            ctx: rank, world_size, step and tensor.
            work: buffers, scan results and counters of this exchange, and the array ops.

        Yields:
            The method's collectives.

        Returns:
            The method's result, with the new values of all slots in ``state``.

        Raises:
            TypeError: the method yields nothing, or does not return a Reduced; or it returned ``own=None``, but its
                feedback needs this rank's share.
        """
        ops = work.ops
        method = self.method
        communication: object = method.exchange(x, self.state, ctx, work)
        if not isinstance(communication, Generator):
            raise TypeError(f"exchange() of method {method.id!r} is not a generator: it never yields a collective")
        reduced = yield from communication
        if not isinstance(reduced, Reduced):
            raise TypeError(f"exchange() of method {method.id!r} returned {type(reduced).__name__}, expected Reduced")
        if method.feedback == "none":
            return reduced
        if reduced.own is None:
            raise TypeError(
                f"method {method.id!r} returned own=None, but feedback {method.feedback!r} needs this rank's share"
            )
        if method.feedback == "momentum":
            ops.zero_where(self.spare[VELOCITY], reduced.own)
        ops.subtract(x, reduced.own, 1.0)  # after zero_where(), because a dense own share may be x itself
        if beta(method) != 1.0:
            ops.blend(x, self.state[RESIDUAL], beta(method))
        return replace(reduced, state={**self.spare, **reduced.state})
