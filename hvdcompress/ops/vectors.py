"""What the array ops take and return besides plain arrays: sparse vectors, and vectors that are still coded.

A coded vector is decoded where it is written (:meth:`hvdcompress.ops.spec.Ops.write`), which saves a pass over memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

Array = Any  #: an array of the backend's library, for example a torch.Tensor; one-dimensional inside a method
NumpyArray = np.ndarray[Any, Any]  #: an array in host memory
Scalar = float | np.floating[Any]  #: a number on the host
Flag = bool | Any  #: yes or no; on a device a tensor of one, 0 or 1, so that the host need not wait for it

FP16_MAX = 65504.0  #: the largest finite float16
FP32_MAX = float(np.finfo(np.float32).max)  #: the largest finite float32


def dtype_name(array: Array) -> str:
    """Return numpy's name of an array's dtype, of torch's dtypes, too."""
    return str(array.dtype).removeprefix("torch.")


class Sparse(NamedTuple):
    """A sparse vector. Values of equal indices add up.

    Attributes:
        index: [m] int32 or int64.
        values: [m] float32.
    """

    index: Array
    values: Array


class Half(NamedTuple):
    """A dense vector in 16 bits: scale·values in float32.

    Attributes:
        values: [n] float16, or the bits of bfloat16 as uint16 (int16 in torch), as in :meth:`Ops.to_bf16`.
        scale: rounded to float32 first.
    """

    values: Array
    scale: float

    @property
    def size(self) -> int:
        """The number of elements, n."""
        return len(self.values)

    def piece(self, start: int, stop: int) -> Half:
        """Return elements ``start`` to ``stop``."""
        return Half(self.values[start:stop], self.scale)


class Codes(NamedTuple):
    """A dense vector in signs and levels, as :meth:`Ops.quantize` and :meth:`Ops.pack_signs` write them.

    Attributes:
        codes: [⌈(start + size)·bits/8⌉] uint8 or more.
        norms: The norm of each bucket [⌈(start + size)/bucket⌉] or more.
        bucket: The number of elements that share a norm.
        bits: The size of a code, 1 to 8. With 1 bit an element is +norm or −norm, and all share one norm.
        start: Which of the codes is the first element.
        size: The number of elements, n.
    """

    codes: Array
    norms: Array
    bucket: int
    bits: int
    start: int
    size: int

    def piece(self, start: int, stop: int) -> Codes:
        """Return elements ``start`` to ``stop``."""
        return self._replace(start=self.start + start, size=stop - start)


class Fields(NamedTuple):
    """A dense vector of whole numbers that were added in words, as :meth:`Ops.pack_fields` writes them, times a scale.

    Attributes:
        words: [⌈(start + size)/⌊32/width⌋⌉] int32 or more.
        width: The size of a field in bits.
        bound: No |number| exceeds it.
        scale: [1] float32, on the device.
        start: Which of the numbers is the first element.
        size: The number of elements, n.
    """

    words: Array
    width: int
    bound: int
    scale: Array
    start: int
    size: int

    def piece(self, start: int, stop: int) -> Fields:
        """Return elements ``start`` to ``stop``."""
        return self._replace(start=self.start + start, size=stop - start)


class Sum(NamedTuple):
    """A sum of dense vectors of one length, added in their order in float32.

    Attributes:
        shares: arrays [n], or coded vectors of n elements; at least one.
    """

    shares: list[Any]

    @property
    def size(self) -> int:
        """The number of elements, n."""
        return size_of(self.shares[0])

    def piece(self, start: int, stop: int) -> Sum:
        """Return elements ``start`` to ``stop``."""
        return Sum([piece_of(share, start, stop) for share in self.shares])


class Joined(NamedTuple):
    """Dense vectors end to end.

    Attributes:
        parts: arrays or coded vectors; at least one.
    """

    parts: list[Any]

    @property
    def size(self) -> int:
        """The number of elements, n."""
        return sum(map(size_of, self.parts))

    def piece(self, start: int, stop: int) -> Joined:
        """Return elements ``start`` to ``stop``."""
        found, begin = [], 0
        for part in self.parts:
            end = begin + size_of(part)
            first, last = max(start, begin), min(stop, end)
            if first < last:
                found.append(piece_of(part, first - begin, last - begin))
            begin = end
        return Joined(found or [piece_of(self.parts[0], 0, 0)])


class Outer(NamedTuple):
    """A matrix of low rank [m × k], which is computed where it is written: scale · Σ left_i·right_iᵀ.

    Products and sums are rounded one by one, in the order of i, and no matrix library makes them, whose sums depend on
    the processor and its threads: unlike machines agree to the bit.

    Attributes:
        left: rows left_i [terms × m] float32.
        right: rows right_i [terms × k] float32.
        terms: their number, 1 or more.
        scale: rounded to float32 first. It multiplies the sum.
        basis: the factor with orthonormal rows, "left" or "right", if they span that of the step before.
    """

    left: Array
    right: Array
    terms: int
    scale: float = 1.0
    basis: Literal["left", "right"] | None = None

    @property
    def size(self) -> int:
        """The number of elements, m·k."""
        return len(self.left) // self.terms * (len(self.right) // self.terms)


class Waves(NamedTuple):
    """A vector [n] made of some frequencies, which is computed where it is written: the inverse of their sum.

    It is :meth:`Ops.irfft` of ``before`` times the sum of the shares, then multiplied by ``after`` and clipped.

    Attributes:
        shares: sparse spectra whose sum is meant. Each has distinct indices [m] of bins, ascending, and values [2m]:
            real and imaginary parts in turns.
        n: number of elements.
        block: the length of a block, as of :meth:`Ops.rfft`.
        before: factor of the spectrum, rounded to float32 first.
        after: factor of the inverse, rounded to float32 first.
        limit: what no |element| exceeds.
    """

    shares: Sequence[Sparse]
    n: int
    block: int
    before: float = 1.0
    after: float = 1.0
    limit: float = FP32_MAX

    @property
    def size(self) -> int:
        """The number of elements, n."""
        return self.n


#: Dense vectors that are decoded where they are written, in float32: what is as large as a gradient is not made twice.
Coded = Half | Codes | Fields | Sum | Joined | Outer | Waves


class Shares(NamedTuple):
    """A sum of sparse vectors of one length, added in their order in float32.

    Attributes:
        each: The vectors; at least one.
    """

    each: list[Sparse]


def both(a: Flag, b: Flag) -> Flag:
    """Return whether both are so. Nothing is asked of a device where one is known to be."""
    return b if a is True else a if b is True else a & b


def size_of(x: Array | Coded) -> int:
    """Return the number of elements of a dense vector."""
    return x.size if isinstance(x, Coded) else len(x)


def piece_of(x: Array | Coded, start: int, stop: int) -> Any:
    """Return elements ``start`` to ``stop`` of a dense vector, which is no :class:`Outer` and no :class:`Waves`."""
    assert not isinstance(x, Outer | Waves)
    return x.piece(start, stop) if isinstance(x, Half | Codes | Fields | Sum | Joined) else x[start:stop]
