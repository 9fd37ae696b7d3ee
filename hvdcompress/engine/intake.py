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

from hvdcompress.engine.setup import Setup
from hvdcompress.engine.together import Together
from hvdcompress.method import Array, Context
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
    if count == 1 or setup.contexts or method.local_clip_norm is not None:
        return False
    if not isinstance(setup.like, np.ndarray):
        return True
    return method.passes and not setup.with_feedback and setup.bucket.spec.size < SMALL * count


class Intake(ABC):
    """The gradients of one setup.

    Attributes:
        enough: elements that are taken in before the last gradient has come.
        x: what is exchanged [n]: gradient + residual, or the gradient; None before it is there.
        finite: whether all gradients that came have neither Inf nor NaN; a tensor of one element on a device.
        cleared: whether the gradients were set to 0, and results are written over them.
        num_missing: how many gradients have not come.
    """

    enough: float

    def __init__(self, setup: Setup):
        self.setup = setup
        self.x: Array | None = None
        self.finite: Flag = True
        self.cleared = False
        self.num_missing = len(setup.bucket.members)
        self._came = bytearray(self.num_missing)
        self._waiting: dict[int, Array] = {}
        self._num_waiting = 0  # elements

    def add(self, indices: Sequence[int], gradients: Sequence[Array], in_place: bool) -> None:
        """Take gradients; when the last one comes, :attr:`x` is complete.

        Args:
            indices: which tensors of the bucket.
            gradients: their flat gradients in the working dtype.
            in_place: results are written over the gradients.
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
            self._take(list(waiting), list(waiting.values()), in_place)
        setup = self.setup
        if not self.num_missing and not setup.contexts:
            assert self.x is not None
            self._take_out(self.finite, self.x, slice(None))

    def missing(self) -> list[int]:
        """Return the indices of tensors whose gradients have not come."""
        return [index for index, came in enumerate(self._came) if not came]

    def has(self, index: int) -> bool:
        """Return whether the gradient of a tensor has come."""
        return bool(self._came[index])

    @abstractmethod
    def _take(self, indices: list[int], gradients: list[Array], in_place: bool) -> None:
        """Take in gradients that have waited."""

    def _look(self, gradient: Array, ctx: Context, part: int | None) -> tuple[Array, Found]:
        """Return what the method sees of a gradient without a residual, and what was found in it.

        Args:
            gradient: the gradient.
            ctx: the context of the method.
            part: the number of the gradient among the parts of ``ctx.spec``; None if it is several of them.
        """
        method = self.setup.method
        ops = self.setup.ops
        scale = self.setup.scale
        # A gradient that is multiplied afterwards is not scanned: it is not what the method sees
        scan = NOTHING if part is None or scale != 1.0 else method.scan(part, ctx, ops, gradient)
        found = ops.look(gradient, scan)
        if found.finite is False:
            gradient = ops.zeros(len(gradient), self.setup.dtype, like=gradient)
            found = ops.look(gradient, scan)._replace(finite=False)
        return gradient if scale == 1.0 else gradient * np.float32(scale), found

    def _accumulate(
        self,
        gradients: list[Array],
        parts: Sequence[int] | None,
        spans: Sequence[tuple[int, int]],
        ctx: Context,
        clear: bool,
    ) -> list[Found]:
        setup = self.setup
        slots = setup.state.slots
        given = (setup.method, gradients, setup.scale, parts, spans, slots, setup.spare, ctx, setup.ops)
        return feedback.receive(*given, clear)

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

    def __init__(self, setup: Setup, together: Together | None = None):
        super().__init__(setup)
        self.together = together

    def _take(self, indices: list[int], gradients: list[Array], in_place: bool) -> None:
        setup = self.setup
        clear = in_place and setup.method.sparse and setup.with_feedback
        self.cleared = clear
        if setup.with_feedback and not setup.contexts:
            spans = [setup.bucket.spans[index] for index in indices]
            founds = self._accumulate(gradients, indices, spans, setup.ctx, clear)
            for index, found in zip(indices, founds, strict=True):
                self._note(setup.ctx, index, found)
            self.x = setup.spare[feedback.RESIDUAL]
            return
        for index, gradient in zip(indices, gradients, strict=True):
            if setup.contexts:
                self._begin(index, gradient, clear)
            else:
                self._take_alone(index, gradient)

    def _take_alone(self, index: int, gradient: Array) -> None:
        """Take in a gradient without a residual."""
        setup = self.setup
        x, found = self._look(gradient, setup.ctx, index)
        self._note(setup.ctx, index, found)
        # With ``saturated``, the scan has written what is sent already, so the gradients need not be joined
        if len(setup.bucket.members) == 1 or found.saturated is not None:
            self.x = x
            return
        if self.x is None:
            size = setup.bucket.spec.size
            self.x = setup.memory.joined_buffer(size, setup.dtype, gradient, setup.ops)
        start, stop = setup.bucket.spans[index]
        setup.ops.write(self.x[start:stop], x, 1.0)

    def _begin(self, index: int, gradient: Array, clear: bool) -> None:
        """Take in the gradient of one tensor, and run the method on it to its first collective."""
        setup = self.setup
        ctx = setup.contexts[index]
        span = setup.bucket.spans[index]
        where = slice(*span)
        if setup.with_feedback:
            (found,) = self._accumulate([gradient], [0], [span], ctx, clear)
            x = setup.spare[feedback.RESIDUAL][where]
            self.x = setup.spare[feedback.RESIDUAL]
        else:
            x, found = self._look(gradient, ctx, 0)
            self.x = x
        self._note(ctx, 0, found)
        self._take_out(found.finite, x, where)
        spare = {slot: buffer[where] for slot, buffer in setup.spare.items()}
        state = {**ctx.state, **{slot: setup.state.slots[slot][where] for slot in spare}}
        assert self.together is not None
        self.together.begin(index, feedback.exchange(setup.method, x, state, spare, ctx, setup.ops))

    def _note(self, ctx: Context, part: int, found: Found) -> None:
        """Note what was found in a gradient."""
        assert ctx.scanned is not None
        ctx.scanned[part] = found
        self.finite = both(self.finite, found.finite)


class Whole(Intake):
    """Joins the gradients when all are there, and makes one pass over the bucket."""

    enough = math.inf

    def _take(self, indices: list[int], gradients: list[Array], in_place: bool) -> None:
        setup = self.setup
        ops = setup.ops
        in_order = [gradient for _, gradient in sorted(zip(indices, gradients, strict=True), key=lambda pair: pair[0])]
        buffer = None
        if isinstance(in_order[0], np.ndarray):
            buffer = setup.memory.joined_buffer(setup.bucket.spec.size, setup.dtype, in_order[0], ops)
        joined = ops.concat(in_order, buffer)
        if setup.with_feedback:
            (found,) = self._accumulate([joined], None, [(0, len(joined))], setup.ctx, False)
            self.x = setup.spare[feedback.RESIDUAL]
        else:
            self.x, found = self._look(joined, setup.ctx, None)
        self.finite = found.finite
