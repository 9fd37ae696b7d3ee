"""Elements of reduced gradients that have waited in residuals, from the exchange to the step of the optimizer.

A share c of each of them is applied without momentum (``parts/momentum.py`` has the equations). The exchange delivers
the reduced gradient unchanged, and leaves a :class:`Late`. Before the optimizer's step the driver adds a multiple of
c·g to the optimizer's buffer, and after the step it subtracts another one (:func:`add_at`); g is the gradient that the
optimizer uses, whatever the program has done to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

import hvdcompress.ops
from hvdcompress.method import Array, Method
from hvdcompress.ops.spec import Ops
from hvdcompress.ops.vectors import Sparse, dtype_name
from hvdcompress.parts import momentum, regions
from hvdcompress.parts.momentum import MAX_WAIT, Moment
from hvdcompress.plan import Bucket

RENEWED = 127 - MAX_WAIT  #: interval in steps at which old stamps are renewed, because stamps repeat after 256 steps


@dataclass(eq=False)
class Late:
    """What one exchange of a bucket has sent.

    Attributes:
        bucket: the bucket.
        method: the method of the exchange.
        indices: the elements that were sent, each once, ascending: an array for the bucket, or one array per tensor.
            None if all of them were sent.
        ages: for each of them, int8 steps since it was last sent; None if these are not tracked.
        spread: (number of ranks) / (mean number of ranks that send the same element), at least 1.
        used: keys of the parts whose gradient an optimizer has used. The driver chooses the keys.
    """

    bucket: Bucket
    method: Method
    indices: list[Array] | None = None
    ages: list[Array] | None = None
    spread: float = 1.0
    used: set[Hashable] = field(default_factory=set)

    def absorb(self, earlier: Late) -> None:
        """Add what an earlier exchange of the same bucket has sent, because the gradients of both are added up."""
        if not (self.indices and earlier.indices):
            return
        for number, (index, before) in enumerate(zip(self.indices, earlier.indices, strict=True)):
            ops = ops_of(index)
            self.indices[number] = both = ops.distinct(ops.concat([index, before]), self.bucket.spec.size)
            if self.ages and earlier.ages:
                ages = ops.zeros(len(both), "int8", index)
                ages[ops.searchsorted(both, before)] = earlier.ages[number]
                ages[ops.searchsorted(both, index)] = self.ages[number]
                self.ages[number] = ages

    @cached_property
    def _cuts(self) -> list[int]:
        """Where the elements of each tensor begin in the indices of a bucket, and where those of the last one end."""
        assert self.indices
        bounds = [0, *(stop for _, stop in self.bucket.spans)]
        return regions.cuts(self.indices[0], bounds, ops_of(self.indices[0]))

    @cached_property
    def joint(self) -> tuple[Array | None, Array | None]:
        """The indices of all elements that were sent, in the bucket as a whole, and their ages."""
        if not self.indices or len(self.indices) == 1:
            return self.indices and self.indices[0], self.ages and self.ages[0]
        ops = ops_of(self.indices[0])
        shifted = [index + start for index, (start, _) in zip(self.indices, self.bucket.spans, strict=True)]
        return ops.concat(shifted), self.ages and ops.concat(self.ages)

    def part(self, number: int, start: int = 0, stop: int | None = None) -> tuple[Array | None, Array | None]:
        """Return the index and the ages of the elements that were sent of a tensor.

        Args:
            number: index of the tensor in the bucket.
            start: the beginning of a part of the tensor; indices are relative to it.
            stop: its end; by default that of the tensor.
        """
        if self.indices is None:
            return None, None
        is_joint = len(self.indices) < len(self.bucket.members)
        index = self.indices[0 if is_joint else number]
        ages = self.ages[0 if is_joint else number] if self.ages else None
        if is_joint:
            tensor = slice(*self._cuts[number : number + 2])
            index = index[tensor] - self.bucket.spans[number][0]
            ages = None if ages is None else ages[tensor]
        size = self.bucket.members[number].size
        if (start, size if stop is None else stop) == (0, size):
            return index, ages
        inside = (index >= start) & (index < stop)
        return index[inside] - start, None if ages is None else ages[inside]

    def shares(self, moment: Moment) -> tuple[Any, float]:
        """Return c: a table by the ages of the elements, or None if it does not depend on them; and a factor of it.

        Args:
            moment: how the optimizer uses its first moment.
        """
        if moment.at_once or momentum.at_once(self.method):
            return None, 1.0
        table = momentum.shares(moment.decay, self.spread if self.method.sparse else 1.0)
        if self.ages is not None:
            return table, 1.0
        return None, float(table[1 if self.method.sparse else min(self.method.delay, MAX_WAIT)])

    def values(self, gradient: Array, index: Array | None, ages: Array | None, moment: Moment) -> tuple[Array, float]:
        """Return c·g of the elements that were sent of a tensor, as an array and a factor of it.

        Args:
            gradient: the gradient of the tensor, flat.
            index: the elements, as of :meth:`part`.
            ages: their ages, as of :meth:`part`.
            moment: how the optimizer uses its first moment.
        """
        table, share = self.shares(moment)
        if index is None:
            return gradient, share
        ops = ops_of(gradient)
        values = ops.take(gradient, index)
        return values if table is None else values * ops.take(ops.asarray(table, gradient), ages), share


def ops_of(array: Array) -> Ops:
    """Return the array ops for a NumPy array or a PyTorch tensor."""
    if isinstance(array, np.ndarray):
        return hvdcompress.ops.fast
    from hvdcompress.ops.torch import ops  # not without PyTorch

    return ops


def nonzero(x: Array) -> Array:
    """Return the indices of the elements of x [n] that are not zero, in ascending order."""
    return np.flatnonzero(x) if isinstance(x, np.ndarray) else x.nonzero().reshape(-1)


def stamp_of(step: int) -> int:
    """Return a step modulo 2^8, in the range of int8."""
    return (step + 2**7) % 2**8 - 2**7


def add_at(buffer: Array, index: Array | None, values: Array, factor: Any) -> None:
    """Add a multiple of values to elements of an optimizer's buffer [n], in place.

    Args:
        buffer: the buffer.
        index: the elements, as of :meth:`Late.part`; None for all.
        values: c·g of these elements.
        factor: the multiple; see ``Moment.changes``.
    """
    if isinstance(buffer, np.ndarray) and dtype_name(buffer) == "float32" and isinstance(factor, float):
        hvdcompress.ops.fast.subtract(buffer, values if index is None else Sparse(index, values), -factor)
    elif index is None:
        buffer += values * factor
    else:
        changed = buffer[index] + values * factor
        buffer[index] = changed if isinstance(changed, np.ndarray) else changed.to(buffer.dtype)


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
    changes: list[tuple[Late, str, tuple[Array, Array | None, Array], float, float]] = []
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
            values, share = late.values(gradient, index, ages, moment)
            values = values.copy() if index is None else values  # the step may change its gradients
            before, after = moment.changes(late.method)
            changes.append((late, member.name, (buffer, index, values), share * before, share * after))
    for _, _, where, before, _ in changes:
        add_at(*where, before)
    try:
        yield
    except BaseException:
        for _, _, where, before, _ in changes:
            add_at(*where, -before)
        raise
    for late, name, where, _, after in changes:
        add_at(*where, -after)
        late.used.add(name)
