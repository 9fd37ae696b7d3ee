"""Intake of gradients: the one pass over memory that each gradient makes when it enters an exchange.

The pass adds the residual, checks for Inf and NaN, and computes the statistics that the method requests
(``Method.scan``). :class:`Tiles` processes about a million elements at a time, while they are in the CPU cache.
:class:`Whole` waits for all gradients of the bucket.
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

TILE = 1 << 20  #: elements processed in one go: as many as the CPU cache holds
SMALL = 1 << 12  #: elements; if the mean gradient is smaller, one call per gradient costs more than a concatenation


def suits_whole(setup: Setup) -> bool:
    """Return whether to process all gradients of the bucket at once.

    On a device, a kernel launch costs more than moving the memory. On the host this holds only for small gradients.
    """
    method = setup.method
    count = len(setup.bucket.members)
    if count == 1 or setup.per_tensor or method.local_clip_norm is not None:
        return False
    if not isinstance(setup.like, np.ndarray):
        return True
    return method.identity and not setup.with_feedback and setup.bucket.spec.size < SMALL * count


class Intake(ABC):
    """Collects the gradients of one exchange.

    Attributes:
        threshold: number of waiting elements from which the intake processes them, before the last gradient.
        x: the vector to exchange [n]: gradient + residual, or the gradient; None before the intake has started it.
        finite: whether all gradients so far are free of Inf and NaN: a bool, or a tensor of one element on a device.
        num_missing: number of gradients that have not been added.
    """

    threshold: float

    def __init__(self, setup: Setup):
        self.setup = setup
        self.x: Array | None = None
        self.finite: Flag = True
        self.num_missing = len(setup.bucket.members)
        self._received = bytearray(self.num_missing)
        self._waiting: dict[int, Array] = {}
        self._num_waiting = 0  # elements

    def add(self, indices: Sequence[int], gradients: Sequence[Array]) -> None:
        """Add gradients. After the last one, :attr:`x` is complete.

        Args:
            indices: indices of the tensors in the bucket.
            gradients: their flat gradients in the working dtype.
        """
        for index, gradient in zip(indices, gradients, strict=True):
            self._received[index] = True
            self._waiting[index] = gradient
            self._num_waiting += len(gradient)
        self.num_missing -= len(indices)
        if not self.num_missing or self._num_waiting >= self.threshold:
            # Reset first: if the method raises an exception, the gradients must not be processed again
            waiting = self._waiting
            self._waiting = {}
            self._num_waiting = 0
            self._process(list(waiting), list(waiting.values()))
        setup = self.setup
        if not self.num_missing and not setup.per_tensor:
            assert self.x is not None
            self._zero_nonfinite(self.finite, self.x, slice(None))

    def missing(self) -> list[int]:
        """Return the indices of the tensors without a gradient so far."""
        return [index for index, received in enumerate(self._received) if not received]

    def has(self, index: int) -> bool:
        """Return whether a tensor has its gradient."""
        return bool(self._received[index])

    @abstractmethod
    def _process(self, indices: list[int], gradients: list[Array]) -> None:
        """Process the waiting gradients."""

    def _scan(
        self, gradient: Array, index: int | None, state: dict[str, Array], ctx: Context, work: Workspace
    ) -> tuple[Array, Found]:
        """Scan a gradient without a residual.

        Args:
            gradient: the gradient.
            index: index of the gradient among the parts of ``ctx.spec``; None if it covers several parts.
            state: the method's state.
            ctx: the method's context.
            work: the method's workspace.

        Returns:
            The vector for the method, and the scan result. A gradient with an Inf or a NaN becomes zeros.
        """
        ops = work.ops
        scale = self.setup.scale
        scan = NOTHING
        # The scan would see values before the multiplication by the loss scale, which the method never sees
        if index is not None and scale == 1.0:
            scan = self.setup.method.scan(index, state, ctx, work, gradient)
        found = ops.inspect(gradient, scan)
        # ``finite`` is a tensor on a device, and then _zero_nonfinite() applies it there
        if found.finite is False:
            gradient = ops.zeros(len(gradient), self.setup.dtype, like=gradient)
            found = ops.inspect(gradient, scan)._replace(finite=False)
        return gradient if scale == 1.0 else gradient * np.float32(scale), found

    def _zero_nonfinite(self, finite: Flag, x: Array, span: slice) -> None:
        """Replace a non-finite gradient in x by zeros, if only the device knows whether it is finite."""
        if isinstance(finite, bool):
            return
        slots = self.setup.state.slots
        residual = slots[feedback.RESIDUAL][span] if self.setup.with_feedback else None
        self.setup.ops.keep_if(finite, x, residual)


class Tiles(Intake):
    """Processes gradients in batches of about a million elements, so that they are read from the CPU cache.

    If the method runs on each tensor, it starts on a tensor as soon as its gradient is processed.
    """

    threshold = TILE

    def __init__(self, setup: Setup, fused: FusedCommunication | None = None):
        super().__init__(setup)
        self.fused = fused

    def _process(self, indices: list[int], gradients: list[Array]) -> None:
        setup = self.setup
        if setup.with_feedback and not setup.per_tensor:
            # One call for all gradients: a call has a fixed cost, and most gradients are small
            spans = [setup.bucket.spans[index] for index in indices]
            founds = setup.feedback.receive(gradients, indices, spans, setup.ctx, setup.work)
            for index, found in zip(indices, founds, strict=True):
                self._store_scan(index, found)
            self.x = setup.feedback.spare[feedback.RESIDUAL]
            return
        for index, gradient in zip(indices, gradients, strict=True):
            if setup.per_tensor:
                self._begin(index, gradient)
            else:
                self._process_plain(index, gradient)

    def _process_plain(self, index: int, gradient: Array) -> None:
        """Process a gradient without error feedback."""
        setup = self.setup
        x, found = self._scan(gradient, index, setup.state.slots, setup.ctx, setup.work)
        self._store_scan(index, found)
        # With ``saturated`` set, the scan has already written the fp16 payload, so x is not needed
        if len(setup.bucket.members) == 1 or found.saturated is not None:
            self.x = x
            return
        # Without feedback, x must not overwrite the gradients, which belong to the framework
        if self.x is None:
            size = setup.bucket.spec.size
            self.x = setup.memory.flat_buffer(size, setup.dtype, gradient, setup.ops)
        start, stop = setup.bucket.spans[index]
        setup.ops.write(self.x[start:stop], x, 1.0)

    def _begin(self, index: int, gradient: Array) -> None:
        """Process the gradient of one tensor and run the method on it to its first collective."""
        setup = self.setup
        # Residuals of all tensors are slices of one array per bucket, and the method's own slots are per tensor
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
            x, found = self._scan(gradient, 0, state, ctx, work)
            self.x = x
        work.scanned = [found]
        self.finite = both(self.finite, found.finite)
        self._zero_nonfinite(found.finite, x, where)
        assert self.fused is not None
        self.fused.begin(index, tensor.exchange(x, ctx, work))

    def _store_scan(self, index: int, found: Found) -> None:
        """Store the scan result of a part of the bucket."""
        scanned = self.setup.work.scanned
        assert scanned is not None
        scanned[index] = found
        self.finite = both(self.finite, found.finite)


class Whole(Intake):
    """Concatenates all gradients of the bucket, then makes one pass over it."""

    threshold = math.inf

    def _process(self, indices: list[int], gradients: list[Array]) -> None:
        setup = self.setup
        ops = setup.ops
        in_order = [gradient for _, gradient in sorted(zip(indices, gradients, strict=True), key=lambda pair: pair[0])]
        # PyTorch's allocator reuses memory by itself, NumPy's does not
        buffer = None
        if isinstance(in_order[0], np.ndarray):
            buffer = setup.memory.flat_buffer(setup.bucket.spec.size, setup.dtype, in_order[0], ops)
        flat = ops.concat(in_order, buffer)
        if setup.with_feedback:
            (found,) = setup.feedback.receive([flat], None, [(0, len(flat))], setup.ctx, setup.work)
            self.x = setup.feedback.spare[feedback.RESIDUAL]
        else:
            self.x, found = self._scan(flat, None, setup.state.slots, setup.ctx, setup.work)
        self.finite = found.finite
