"""What one pass over a gradient is to find, and what it found: see :meth:`hvdcompress.ops.spec.Ops.accumulate`."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from hvdcompress.ops.vectors import Array, Flag, Scalar, Sparse

Norm = Literal["max", "l2", "mean"]  #: the largest |x|, the Euclidean norm, or the mean |x|


class Product(NamedTuple):
    """A product that is asked for: of ``a`` with a vector, read as a matrix, as by :meth:`Ops.matmul_transposed`.

    Attributes:
        a: [rows × m].
        rows: The number of rows.
        remove: What aᵀ · product is multiplied by to get a's part of the vector, if that may be subtracted at once;
            0: it may not. Rows that are orthogonal and have the length l need 1/l².
    """

    a: Array
    rows: int
    remove: float = 0.0


class Halves(NamedTuple):
    """A conversion that is asked for, as by :meth:`Ops.to_fp16`.

    Attributes:
        scale: Rounded to float32 first.
        limit: At most the largest finite float16.
        out: [n] float16 that receives the result.
    """

    scale: float
    limit: float
    out: Array


class Scan(NamedTuple):
    """What a pass over a vector is to find besides whether all its elements are finite.

    Attributes:
        moments: Whether to find :meth:`Ops.moments`.
        chunk: Find :meth:`Ops.chunk_argmax` of chunks of so many elements; 0: do not.
        above: Find the elements with |x| > above; None: do not.
        capacity: Fewer elements above than this are of use.
        signs: Whether to find :meth:`Ops.pack_signs` and the mean |x|, as of :meth:`Ops.bucket_norms` of one bucket.
        largest: Whether to find :meth:`Ops.max_abs`.
        product: What to multiply with the vector, read as a matrix of rows of m elements; None: do not.
        halves: How to convert the vector to float16; None: do not.
    """

    moments: bool = False
    chunk: int = 0
    above: Scalar | None = None
    capacity: int = 0
    signs: bool = False
    largest: bool = False
    product: Product | None = None
    halves: Halves | None = None


NOTHING = Scan()  #: nothing but whether all elements are finite


class Found(NamedTuple):
    """What a pass over a vector found.

    Attributes:
        finite: Whether all elements are finite. If they are not, the rest means nothing.
        moments: The mean and the standard deviation, or None if they were not asked for.
        offsets: Of the largest |x| of each chunk, or None if they were not asked for.
        above: The elements above the threshold, or None if they were not asked for or are ``capacity`` or more.
        signs: The signs [⌈n/8⌉] uint8 and the mean magnitude [1], or None if they were not asked for.
        largest: The largest magnitude, or None if it was not asked for.
        product: The product [rows × n/m], to rounding, or None if it was not asked for.
        removed: Whether a's part was subtracted from the vector, as ``Product.remove`` allowed. Not every backend does.
        saturated: How many elements were clipped when they were converted to float16, as :meth:`Ops.to_fp16` returns
            it; None if that was not asked for.
    """

    finite: Flag
    moments: tuple[float, float] | None = None
    offsets: Array | None = None
    above: Sparse | None = None
    signs: tuple[Array, Array] | None = None
    largest: float | None = None
    product: Array | None = None
    saturated: Any = None
    removed: bool = False


Span = tuple[int, int]  #: where a part of a vector begins and ends


class Velocity(NamedTuple):
    """The momentum of a gradient.

    Attributes:
        old: [n].
        new: [n]; it is written.
        momentum: The factor of ``old``; rounded to float32 first.
    """

    old: Array
    new: Array
    momentum: float
