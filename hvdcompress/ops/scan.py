"""Requests and results of a pass over a gradient (:meth:`hvdcompress.ops.spec.Ops.accumulate`).

A pass that adds gradient and residual can compute statistics of the sum at little extra cost, while the sum is in the
processor's cache. A :class:`Scan` requests them, and a :class:`Found` has the results.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from hvdcompress.ops.vectors import Array, Flag, Scalar, Sparse

Norm = Literal["max", "l2", "mean"]  #: the largest |x|, the Euclidean norm, or the mean |x|


class Product(NamedTuple):
    """Request for the product of ``a`` and a vector that is read as a matrix, as :meth:`Ops.matmul_transposed` does.

    Attributes:
        a: [rows × m].
        rows: Number of rows of ``a``.
        remove: If not 0, the pass may subtract remove · aᵀ · product, the projection onto the rows of ``a``, from the
            vector. For orthogonal rows of length l, this factor is 1/l².
    """

    a: Array
    rows: int
    remove: float = 0.0


class Halves(NamedTuple):
    """Request for a conversion to float16, as :meth:`Ops.to_fp16` does.

    Attributes:
        scale: Rounded to float32 first.
        limit: At most the largest finite float16.
        out: [n] float16 that receives the result.
    """

    scale: float
    limit: float
    out: Array


class Scan(NamedTuple):
    """What a pass over a vector computes in addition to the check that all elements are finite.

    Attributes:
        chunk: Chunk size for :meth:`Ops.chunk_argmax`; 0: not computed.
        above: Threshold: collect the elements with |x| > above; None: not computed.
        capacity: Collect the elements above the threshold only if there are fewer than ``capacity``.
        product: The product to compute; None: not computed.
        halves: The conversion to float16; None: not converted.
    """

    chunk: int = 0
    above: Scalar | None = None
    capacity: int = 0
    product: Product | None = None
    halves: Halves | None = None


NOTHING = Scan()  #: only the check that all elements are finite


class Found(NamedTuple):
    """Results of a pass over a vector. A result that was not requested is None.

    Attributes:
        finite: Whether all elements are finite. If not, the other results are undefined.
        offsets: Offset of the largest |x| in each chunk.
        above: The elements above the threshold; None also if there are ``capacity`` elements or more.
        product: The product [rows × n/m], to rounding.
        saturated: Number of elements that the conversion to float16 clipped, as :meth:`Ops.to_fp16` returns it.
        removed: Whether the pass subtracted the projection onto the rows of ``a``, as ``Product.remove`` allows. Not
            every backend does.
    """

    finite: Flag
    offsets: Array | None = None
    above: Sparse | None = None
    product: Array | None = None
    saturated: Any = None
    removed: bool = False


Span = tuple[int, int]  #: (start, stop) of a part of a vector


class Velocity(NamedTuple):
    """Momentum of a gradient: new = momentum·old + gradient.

    Attributes:
        old: [n], read only.
        new: [n], written.
        momentum: Factor of ``old``; rounded to float32 first.
    """

    old: Array
    new: Array
    momentum: float
