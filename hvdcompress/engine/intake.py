"""How the gradients of a bucket enter an exchange: the one pass over memory that each of them makes.

That pass adds the residual, looks for an Inf or a NaN, and finds what the method asks for (``Method.scan``).
:class:`Tiles` makes it for a million elements at a time, while they are in the processor's cache; :class:`Whole` makes
it once for the whole bucket.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from hvdcompress.engine.fused import FusedCommunication
from hvdcompress.engine.setup import Setup
from hvdcompress.method import Array, Context, Workspace
from hvdcompress.ops.scan import NOTHING, Found
from hvdcompress.ops.vectors import Flag, both
from hvdcompress.parts import feedback

TILE = 1 << 20  #: elements of gradients that are taken in together: as many as the processor's cache still holds
SMALL = 1 << 12  #: elements, on average; below, a call for each gradient costs more than joining them


def suits_whole(setup: Setup) -> bool:
    """Return whether the gradients should wait for each other.

    On a device each call costs more than memory does. On the host the same is true of small gradients.
    """
    method = setup.method
    count = len(setup.bucket.members)
    if count == 1 or setup.per_tensor or method.local_clip_norm is not None:
        return False
    if not isinstance(setup.like, np.ndarray):
        return True
    return method.identity and not setup.with_feedback and setup.bucket.spec.size < SMALL * count


class Intake(ABC):
    """The gradients of one setup.

    Attributes:
        enough: elements that are taken in before the last gradient has come.
        x: what is exchanged [n]: gradient + residual, or the gradient; None before it is there.
        finite: whether all gradients that came have neither Inf nor NaN; a tensor of one element on a device.
        num_missing: how many gradients have not come.
    """

    enough: float

    def __init__(self, setup: Setup):
        self.setup = setup
        self.x: Array | None = None
        self.finite: Flag = True
        self.num_missing = len(setup.bucket.members)
        self._came = bytearray(self.num_missing)
        self._waiting: dict[int, Array] = {}
        self._num_waiting = 0  # elements

    def add(self, indices: Sequence[int], gradients: Sequence[Array]) -> None:
        """Take gradients; when the last one comes, :attr:`x` is complete.

        Args:
            indices: which tensors of the bucket.
            gradients: their flat gradients in the working dtype.
        """
        for index, gradient in zip(indices, gradients, strict=True):
            self._came[index] = True
            self._waiting[index] = gradient
            self._num_waiting += len(gradient)
        self.num_missing -= len(indices)
        if not self.num_missing or self._num_waiting >= self.enough:
            waiting = self._waiting
            self._waiting = {}
            self._num_waiting = 0
            self._take(list(waiting), list(waiting.values()))
        setup = self.setup
        if not self.num_missing and not setup.per_tensor:
            assert self.x is not None
            self._take_out(self.finite, self.x, slice(None))

    def missing(self) -> list[int]:
        """Return the indices of tensors whose gradients have not come."""
        return [index for index, came in enumerate(self._came) if not came]

    def has(self, index: int) -> bool:
        """Return whether the gradient of a tensor has come."""
        return bool(self._came[index])

    @abstractmethod
    def _take(self, indices: list[int], gradients: list[Array]) -> None:
        """Take in gradients that have waited."""

    def _look(
        self, gradient: Array, index: int | None, state: dict[str, Array], ctx: Context, work: Workspace
    ) -> tuple[Array, Found]:
        """Return what the method sees of a gradient without a residual, and what was found in it.

        Args:
            gradient: the gradient.
            index: the index of the gradient among the parts of ``ctx.spec``; None if it is several of them.
            state: the state of the method.
            ctx: the context of the method.
            work: the workspace of the method.
        """
        ops = work.ops
        scale = self.setup.scale
        scan = NOTHING
        # A gradient that is multiplied afterwards is not scanned: it is not what the method sees
        if index is not None and scale == 1.0:
            scan = self.setup.method.scan(index, state, ctx, work, gradient)
        found = ops.look(gradient, scan)
        if found.finite is False:
            gradient = ops.zeros(len(gradient), self.setup.dtype, like=gradient)
            found = ops.look(gradient, scan)._replace(finite=False)
        return gradient if scale == 1.0 else gradient * np.float32(scale), found

    def _take_out(self, finite: Flag, x: Array, span: slice) -> None:
        """Remove a gradient that is not finite from x, where only the device knows whether it is finite."""
        if isinstance(finite, bool):
            return
        slots = self.setup.state.slots
        residual = slots[feedback.RESIDUAL][span] if self.setup.with_feedback else None
        self.setup.ops.keep_if(finite, x, residual)


class Tiles(Intake):
    """Takes gradients in by a million elements, so that each is read while the cache holds it.

    Where the method runs on each tensor, it begins with each as soon as that is taken in.
    """

    enough = TILE

    def __init__(self, setup: Setup, fused: FusedCommunication | None = None):
        super().__init__(setup)
        self.fused = fused

    def _take(self, indices: list[int], gradients: list[Array]) -> None:
        setup = self.setup
        if setup.with_feedback and not setup.per_tensor:
            spans = [setup.bucket.spans[index] for index in indices]
            founds = setup.feedback.receive(gradients, indices, spans, setup.ctx, setup.work)
            for index, found in zip(indices, founds, strict=True):
                self._note(index, found)
            self.x = setup.feedback.spare[feedback.RESIDUAL]
            return
        for index, gradient in zip(indices, gradients, strict=True):
            if setup.per_tensor:
                self._begin(index, gradient)
            else:
                self._take_alone(index, gradient)

    def _take_alone(self, index: int, gradient: Array) -> None:
        """Take in a gradient without a residual."""
        setup = self.setup
        x, found = self._look(gradient, index, setup.state.slots, setup.ctx, setup.work)
        self._note(index, found)
        # With ``saturated``, the scan has written what is sent already, so the gradients need not be joined
        if len(setup.bucket.members) == 1 or found.saturated is not None:
            self.x = x
            return
        if self.x is None:
            size = setup.bucket.spec.size
            self.x = setup.memory.flat_buffer(size, setup.dtype, gradient, setup.ops)
        start, stop = setup.bucket.spans[index]
        setup.ops.write(self.x[start:stop], x, 1.0)

    def _begin(self, index: int, gradient: Array) -> None:
        """Take in the gradient of one tensor, and run the method on it to its first collective."""
        setup = self.setup
        ctx, work = setup.per_tensor[index]
        where = slice(*setup.bucket.spans[index])
        spare = {slot: buffer[where] for slot, buffer in setup.feedback.spare.items()}
        state = {**setup.state.members[index], **{slot: setup.state.slots[slot][where] for slot in spare}}
        tensor = feedback.Feedback(setup.method, state, spare, setup.scale)
        if setup.with_feedback:
            (found,) = tensor.receive([gradient], [0], [(0, len(gradient))], ctx, work)
            x = spare[feedback.RESIDUAL]
            self.x = setup.feedback.spare[feedback.RESIDUAL]
        else:
            x, found = self._look(gradient, 0, state, ctx, work)
            self.x = x
        work.scanned = [found]
        self.finite = both(self.finite, found.finite)
        self._take_out(found.finite, x, where)
        assert self.fused is not None
        self.fused.begin(index, tensor.exchange(x, ctx, work))

    def _note(self, index: int, found: Found) -> None:
        """Note what was found in the gradient of a part of the bucket."""
        scanned = self.setup.work.scanned
        assert scanned is not None
        scanned[index] = found
        self.finite = both(self.finite, found.finite)


class Whole(Intake):
    """Joins the gradients when all are there, and makes one pass over the bucket."""

    enough = math.inf

    def _take(self, indices: list[int], gradients: list[Array]) -> None:
        setup = self.setup
        ops = setup.ops
        in_order = [gradient for _, gradient in sorted(zip(indices, gradients, strict=True), key=lambda pair: pair[0])]
        buffer = None
        if isinstance(in_order[0], np.ndarray):
            buffer = setup.memory.flat_buffer(setup.bucket.spec.size, setup.dtype, in_order[0], ops)
        joined = ops.concat(in_order, buffer)
        if setup.with_feedback:
            (found,) = setup.feedback.receive([joined], None, [(0, len(joined))], setup.ctx, setup.work)
            self.x = setup.feedback.spare[feedback.RESIDUAL]
        else:
            self.x, found = self._look(joined, None, setup.state.slots, setup.ctx, setup.work)
        self.finite = found.finite
