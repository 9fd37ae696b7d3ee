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
from itertools import pairwise
from typing import Any

import numpy as np

import hvdcompress.ops
from hvdcompress.method import Array, Method
from hvdcompress.ops.spec import Ops
from hvdcompress.ops.vectors import dtype_name
from hvdcompress.parts import momentum
from hvdcompress.parts.momentum import MAX_WAIT, Moment
from hvdcompress.plan import Bucket

RENEWED = 127 - MAX_WAIT  #: interval in steps at which old stamps are renewed, because stamps repeat after 256 steps
MANY = 64  #: runs of indices, beyond which all elements are compared
COUNTED = 4096  #: elements; of more, a sample of about this size estimates how many ranks send the same element


@dataclass(eq=False)
class Late:
    """What one exchange of a bucket has sent.

    Attributes:
        bucket: the bucket.
        method: the method of the exchange.
        indices: the elements that were sent, in order of the ranks: one array for the bucket, or one per tensor. None
            if all of them were sent.
        ages: for each of them, int8 steps since it was last sent; None if these are not tracked.
        ranks: number of ranks that selected elements of their own.
        used: keys of the parts whose gradient an optimizer has used. The driver chooses the keys.
    """

    bucket: Bucket
    method: Method
    indices: list[Array] | None = None
    ages: list[Array] | None = None
    ranks: int = 1
    used: set[Hashable] = field(default_factory=set)

    def absorb(self, earlier: Late) -> None:
        """Add what an earlier exchange of the same bucket has sent, because the gradients of both are added up."""
        if not (self.indices and earlier.indices):
            return
        for number, (index, before) in enumerate(zip(self.indices, earlier.indices, strict=True)):
            ops = ops_of(index)
            ascending = ops.sort(index)
            again = ops.searchsorted(ascending, before) < ops.searchsorted(ascending, before + 1)
            self.indices[number] = ops.concat([index, before[~again]])
            if self.ages and earlier.ages:
                self.ages[number] = ops.concat([self.ages[number], earlier.ages[number][~again]])

    @cached_property
    def _runs(self) -> list[list[tuple[int, int]]]:
        """The ascending runs that each array of indices consists of, usually one per rank; none if there are many."""
        runs = []
        for index in self.indices or ():
            breaks = (np.flatnonzero(index[1:] < index[:-1]) + 1).tolist()
            runs.append(list(pairwise([0, *breaks, len(index)])) if len(breaks) < MANY else [])
        return runs

    @cached_property
    def _spread(self) -> float:
        """(number of ranks) / (mean number of ranks that send the same element), rounded to eighths.

        If there are many elements, only those whose index is divisible by a power of two are counted.
        """
        sent = different = 0
        for index in self.indices if self.indices and self.ranks > 1 else ():
            power = max(0, (len(index) // COUNTED).bit_length())
            if power:
                index = index[index & (2**power - 1) == 0]
            host = index if isinstance(index, np.ndarray) else index.cpu().numpy()
            sent += len(host)
            different += len(np.unique(host))
        return max(1.0, round(8 * self.ranks * different / sent) / 8) if sent else 1.0

    def part(self, number: int, start: int = 0, stop: int | None = None) -> tuple[Array | None, Array | None]:
        """Return the index and the ages of the elements that were sent of a tensor.

        Args:
            number: index of the tensor in the bucket.
            start: the beginning of a part of the tensor; indices are relative to it.
            stop: its end; by default that of the tensor.
        """
        if self.indices is None:
            return None, None
        size = self.bucket.members[number].size
        stop = size if stop is None else stop
        whole = len(self.indices) == len(self.bucket.members)
        index = self.indices[number if whole else 0]
        ages = self.ages[number if whole else 0] if self.ages else None
        if whole and (start, stop) == (0, size):
            return index, ages
        first = start + (0 if whole else self.bucket.spans[number][0])
        last = first + stop - start
        if isinstance(index, np.ndarray) and (runs := self._runs[number if whole else 0]):
            # Each run ascends. Looking up its part is faster than comparing all elements
            cuts = [slice(*(begin + np.searchsorted(index[begin:end], (first, last)))) for begin, end in runs]
            found = np.concatenate([index[cut] for cut in cuts]) - first
            return found, None if ages is None else np.concatenate([ages[cut] for cut in cuts])
        inside = (index >= first) & (index < last)
        return index[inside] - first, None if ages is None else ages[inside]

    def values(self, gradient: Array, index: Array | None, ages: Array | None, moment: Moment) -> tuple[Array, float]:
        """Return c·g of the elements that were sent of a tensor, as an array and a factor of it.

        Args:
            gradient: the gradient of the tensor, flat.
            index: the elements, as of :meth:`part`.
            ages: their ages, as of :meth:`part`.
            moment: how the optimizer uses its first moment.
        """
        share = 1.0
        if not (moment.at_once or momentum.at_once(self.method)):
            table = momentum.shares(moment.decay, self._spread if self.method.sparse else 1.0)
            if index is not None and ages is not None:
                ops = ops_of(gradient)
                return ops.take(gradient, index) * ops.take(ops.asarray(table, gradient), ages), 1.0
            share = float(table[1 if self.method.sparse else min(self.method.delay, MAX_WAIT)])
        return gradient if index is None else ops_of(gradient).take(gradient, index), share


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
    if dtype_name(buffer) == "float32" and isinstance(factor, float):
        if index is None:
            ops_of(buffer).subtract(buffer, values, -factor)
        else:
            ops_of(buffer).add_once(buffer, index, values, factor)
    elif index is None:
        buffer += values * factor
    else:  # an element that several ranks sent has several entries
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
