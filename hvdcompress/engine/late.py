"""Elements of reduced gradients that have waited in residuals, from the exchange to the step of the optimizer.

A share c of each of them is applied without momentum (``parts/momentum.py`` has the equations). The exchange delivers
the reduced gradient unchanged, and leaves a :class:`Late`. Before the optimizer's step the driver adds a multiple of
c·g to the optimizer's buffer, and after the step it subtracts another one (:class:`Shift`); g is the gradient that the
optimizer uses, whatever the program has done to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from hvdcompress.method import Array, Method
from hvdcompress.ops.spec import Ops
from hvdcompress.parts import momentum
from hvdcompress.parts.momentum import MAX_WAIT, Moment
from hvdcompress.plan import Bucket

RENEWED = 127 - MAX_WAIT  #: interval in steps at which old stamps are renewed, because stamps repeat after 256 steps
COUNTED = 4096  #: elements; of more, a sample of about this size estimates how many ranks send the same element


class Late:
    """What one exchange of a bucket has sent.

    Args:
        bucket: the bucket.
        method: the method of the exchange.
        ops: the array ops of the indices' library; None without indices.
        indices: the elements that were sent, in order of the ranks: one array for the bucket, or one per tensor. None
            if all of them were sent.
        ages: for each of them, int8 steps since it was last sent; None if these are not tracked.
        ranks: number of ranks that selected elements of their own.

    Attributes:
        used: keys of the parts whose gradient an optimizer has used. The driver chooses the keys.
    """

    def __init__(
        self,
        bucket: Bucket,
        method: Method,
        ops: Ops | None,
        indices: Sequence[Array] | None = None,
        ages: Sequence[Array] | None = None,
        ranks: int = 1,
    ):
        self.bucket = bucket
        self.method = method
        self._ops = ops
        self.used: set[Hashable] = set()
        self._indices = indices
        self._ages = ages
        self._ranks = ranks

    @cached_property
    def _spread(self) -> float:
        """(number of ranks) / (mean number of ranks that send the same element), rounded to eighths.

        If there are many elements, only those whose index is divisible by a power of two are counted.
        """
        sent = different = 0
        for index in self._indices if self._indices and self._ranks > 1 else ():
            power = max(0, (len(index) // COUNTED).bit_length())
            if power:
                index = index[index & (2**power - 1) == 0]
            host = index if isinstance(index, np.ndarray) else index.cpu().numpy()
            sent += len(host)
            different += len(np.unique(host))
        return max(1.0, round(8 * self._ranks * different / sent) / 8) if sent else 1.0

    def part(self, number: int, start: int = 0, stop: int | None = None) -> tuple[Array | None, Array | None]:
        """Return the index and the ages of the elements that were sent of a tensor.

        Args:
            number: index of the tensor in the bucket.
            start: the beginning of a part of the tensor; indices are relative to it.
            stop: its end; by default that of the tensor.
        """
        if self._indices is None:
            return None, None
        size = self.bucket.members[number].size
        stop = size if stop is None else stop
        whole = len(self._indices) == len(self.bucket.members)
        index = self._indices[number if whole else 0]
        ages = self._ages[number if whole else 0] if self._ages else None
        if whole and (start, stop) == (0, size):
            return index, ages
        offset = 0 if whole else self.bucket.spans[number][0]
        inside = (index >= start + offset) & (index < stop + offset)
        return index[inside] - (start + offset), None if ages is None else ages[inside]

    def share(self, ages: Array | None, moment: Moment) -> Any:
        """Return the share c of a tensor: a number, or float32 [k], one for each element that was sent."""
        if moment.at_once or momentum.at_once(self.method):
            return 1.0
        if not self.method.sparse:
            return float(momentum.shares(moment.decay)[min(self.method.delay, MAX_WAIT)])
        table = momentum.shares(moment.decay, self._spread)
        if ages is None:
            return float(table[1])
        if isinstance(ages, np.ndarray):
            return table[ages]
        assert self._ops is not None
        return self._ops.asarray(table, ages)[ages.long()]


def nonzero(x: Array) -> Array:
    """Return the indices of the elements of x [n] that are not zero, in ascending order."""
    return np.flatnonzero(x) if isinstance(x, np.ndarray) else x.nonzero().reshape(-1)


def stamp_of(step: int) -> int:
    """Return a step modulo 2^8, in the range of int8."""
    return (step + 2**7) % 2**8 - 2**7


class Shift:
    """A change of one optimizer buffer for one step.

    Args:
        index: the elements, as of :meth:`Late.part`; None for all.
        values: c·g of these elements.
        changes: the multiples of ``values`` to add before the step and to subtract after it; see ``Moment.changes``.
    """

    def __init__(self, index: Array | None, values: Array, changes: tuple[Any, Any]):
        self.index = index
        self.values = values
        self.before, self.after = changes

    def begin(self, buffer: Array) -> None:
        """Change the buffer [n] before the step, in place."""
        self._add(buffer, self.before)

    def end(self, buffer: Array) -> None:
        """Change the buffer after the step, in place."""
        self._add(buffer, -self.after)

    def undo(self, buffer: Array) -> None:
        """Take back :meth:`begin`, because the step has failed or begins again."""
        self._add(buffer, -self.before)

    def _add(self, buffer: Array, factor: Any) -> None:
        change = self.values * factor
        if self.index is None:
            buffer += change
        else:
            # An element that several ranks sent has several entries, which are equal: add one of them
            changed = buffer[self.index] + change
            buffer[self.index] = changed if isinstance(changed, np.ndarray) else changed.to(buffer.dtype)


@contextlib.contextmanager
def adapted(
    sent: Iterable[Late],
    buffers: Mapping[str, Array],
    gradients: Mapping[str, Array],
    moment: Moment,
    flat: Callable[[Any], Array],
) -> Iterator[None]:
    """Context manager around an optimizer's step that adapts its momentum to the last exchange.

    Args:
        sent: what the exchanges have sent.
        buffers: the first moments by tensor name; changed in place.
        gradients: the gradients that the optimizer uses, by tensor name.
        moment: how the optimizer uses its buffers.
        flat: returns an array as a flat view.

    Raises:
        ValueError: a tensor has a buffer but no gradient, or they have not the size of the tensor.
    """
    shifts: list[tuple[Array, Shift]] = []
    used: list[tuple[Late, str]] = []
    for late in list(sent) if moment.decay else ():
        for number, member in enumerate(late.bucket.members):
            if member.name not in buffers or member.name in late.used:
                continue
            if member.name not in gradients:
                raise ValueError(f"{member.name!r} has a buffer, but no gradient")
            buffer, gradient = flat(buffers[member.name]), flat(gradients[member.name])
            if not len(buffer) == len(gradient) == member.size:
                sizes = f"its buffer {len(buffer)} and its gradient {len(gradient)}"
                raise ValueError(f"{member.name!r} has {member.size} elements, {sizes}")
            index, ages = late.part(number)
            values = (gradient if index is None else gradient[index]) * late.share(ages, moment)
            shifts.append((buffer, Shift(index, values, moment.changes(late.method))))
            used.append((late, member.name))
    for buffer, shift in shifts:
        shift.begin(buffer)
    try:
        yield
    except BaseException:
        for buffer, shift in shifts:
            shift.undo(buffer)
        raise
    for buffer, shift in shifts:
        shift.end(buffer)
    for late, name in used:
        late.used.add(name)
