"""Vectors that array ops take and return besides plain arrays: sparse vectors and coded dense vectors.

A coded vector (:data:`Coded`) is a dense vector whose elements are not computed yet. :meth:`Ops.write` and
:meth:`Ops.subtract` decode it into their output, which saves an array of the gradient's size and a pass over memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np

Array = Any  #: an array of the backend's library, for example a torch.Tensor; one-dimensional inside a method
NumpyArray = np.ndarray[Any, Any]  #: an array in host memory
Scalar = float | np.floating[Any]  #: a number on the host
Flag = bool | Any  #: a bool; on a device a tensor [1] of 0 or 1, so that the host need not wait for the device

FP16_MAX = 65504.0  #: the largest finite float16
FP32_MAX = float(np.finfo(np.float32).max)  #: the largest finite float32


def dtype_name(array: Array) -> str:
    """Return numpy's name of an array's dtype, also for torch tensors."""
    return _name_of(array.dtype)


@cache
def _name_of(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


class Sparse(NamedTuple):
    """A sparse vector. Values of equal indices add up.

    Attributes:
        index: [m] int32 or int64.
        values: [m] float32.
    """

    index: Array
    values: Array


class Half(NamedTuple):
    """A dense vector in a 16-bit format: scale·values in float32.

    Attributes:
        values: [n] float16, or the bits of bfloat16 as int16, as returned by :meth:`Ops.to_bf16`.
        scale: Factor of the values; rounded to float32 first.
    """

    values: Array
    scale: float

    @property
    def size(self) -> int:
        """Number of elements, n."""
        return len(self.values)

    def piece(self, start: int, stop: int) -> Half:
        """Return elements ``start`` to ``stop``."""
        return Half(self.values[start:stop], self.scale)


class Codes(NamedTuple):
    """A dense vector of indices of levels, in units of a norm.

    Attributes:
        codes: [⌈(start + size)·bits/8⌉] uint8 or more.
        norms: The norm of each bucket [⌈(start + size)/bucket⌉] or more.
        bucket: Number of elements that share a norm.
        table: The levels [m] float32, in host memory: those of :meth:`Ops.encode_levels`, :func:`quantized_levels`
            for the codes of :meth:`Ops.quantize`, or ``SIGNS`` for those of :meth:`Ops.pack_signs`.
        bits: Bits per index.
        start: Index of the code of the first element.
        size: Number of elements, n.
    """

    codes: Array
    norms: Array
    bucket: int
    table: NumpyArray
    bits: int
    start: int
    size: int

    def piece(self, start: int, stop: int) -> Codes:
        """Return elements ``start`` to ``stop``."""
        return self._replace(start=self.start + start, size=stop - start)


SIGNS = np.array([1, -1], np.float32)  #: the levels of :meth:`Ops.pack_signs`


def signs_of(codes: Array, norm: Array, n: int) -> Codes:
    """Return n elements whose signs were packed by :meth:`Ops.pack_signs`, and which share a magnitude [1]."""
    return Codes(codes, norm, max(n, 1), SIGNS, 1, 0, n)


@cache
def quantized_levels(bits: int) -> NumpyArray:
    """Return the value of each code of :meth:`Ops.quantize` [2^bits]: ±level/s. Both zeros are +0."""
    level = np.arange(1 << (bits - 1), dtype=np.float32) / np.float32((1 << (bits - 1)) - 1)
    return np.concatenate([level, np.float32(0) - level])


class Fields(NamedTuple):
    """A dense vector of integers, packed into words by :meth:`Ops.quantize_fields`, times a scale.

    Attributes:
        words: [⌈(start + size)/⌊32/width⌋⌉] int32 or more; may be a sum of such words.
        width: Bits per field.
        bound: Upper bound of the integers' magnitudes.
        scale: [1] float32, on the device.
        start: Index of the field of the first element.
        size: Number of elements, n.
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
        shares: Arrays [n] or coded vectors of n elements; at least one.
    """

    shares: list[Any]

    @property
    def size(self) -> int:
        """Number of elements, n."""
        return size_of(self.shares[0])

    def piece(self, start: int, stop: int) -> Sum:
        """Return elements ``start`` to ``stop``."""
        return Sum([piece_of(share, start, stop) for share in self.shares])


class Joined(NamedTuple):
    """A concatenation of dense vectors.

    Attributes:
        parts: Arrays or coded vectors; at least one.
    """

    parts: list[Any]

    @property
    def size(self) -> int:
        """Number of elements, n."""
        return sum(map(size_of, self.parts))

    def piece(self, start: int, stop: int) -> Joined:
        """Return elements ``start`` to ``stop``."""
        pieces = []
        begin = 0
        for part in self.parts:
            end = begin + size_of(part)
            first = max(start, begin)
            last = min(stop, end)
            if first < last:
                pieces.append(piece_of(part, first - begin, last - begin))
            begin = end
        return Joined(pieces or [piece_of(self.parts[0], 0, 0)])


class Outer(NamedTuple):
    """A low-rank matrix [m × k], flat: scale · Σ left_i·right_iᵀ.

    Each product and each sum is rounded, in the order of i. No matrix library computes them, because its sums depend on
    the processor and the number of threads; so different machines agree to the bit.

    Attributes:
        left: Rows left_i [terms × m] float32.
        right: Rows right_i [terms × k] float32.
        terms: Number of terms, 1 or more.
        scale: Factor of the sum; rounded to float32 first.
        basis: "left" or "right" if the rows of this factor are orthonormal and span the previous step's factor.
    """

    left: Array
    right: Array
    terms: int
    scale: float = 1.0
    basis: Literal["left", "right"] | None = None

    @property
    def size(self) -> int:
        """Number of elements, m·k."""
        return len(self.left) // self.terms * (len(self.right) // self.terms)


class Spectra(NamedTuple):
    """A vector [n] given by sparse spectra: clip(after · irfft(before · Σ shares), ±limit).

    Attributes:
        shares: Sparse spectra. Each has distinct, ascending indices [m] of bins, and values [2m]: real and imaginary
            parts alternating.
        n: Number of elements.
        block: Block length of :meth:`Ops.largest_frequencies`.
        before: Factor of the spectrum; rounded to float32 first.
        after: Factor of the inverse transform; rounded to float32 first.
        limit: Magnitudes are clipped to it.
    """

    shares: Sequence[Sparse]
    n: int
    block: int
    before: float = 1.0
    after: float = 1.0
    limit: float = FP32_MAX

    @property
    def size(self) -> int:
        """Number of elements, n."""
        return self.n


#: Dense vectors that :meth:`Ops.write` and :meth:`Ops.subtract` decode, in float32, into their output
Coded = Half | Codes | Fields | Sum | Joined | Outer | Spectra


class Shares(NamedTuple):
    """A sum of sparse vectors of one length, added in their order in float32.

    Attributes:
        each: Sparse vectors; at least one.
    """

    each: list[Sparse]


def both(a: Flag, b: Flag) -> Flag:
    """Return ``a and b``. If one of them is the constant True, no operation runs on the device."""
    return b if a is True else a if b is True else a & b


def size_of(x: Array | Coded) -> int:
    """Return the number of elements of a dense vector."""
    return x.size if isinstance(x, Coded) else len(x)


def piece_of(x: Array | Coded, start: int, stop: int) -> Any:
    """Return elements ``start`` to ``stop`` of a dense vector; :class:`Outer` and :class:`Spectra` have no pieces."""
    assert not isinstance(x, Outer | Spectra)
    return x.piece(start, stop) if isinstance(x, Half | Codes | Fields | Sum | Joined) else x[start:stop]
