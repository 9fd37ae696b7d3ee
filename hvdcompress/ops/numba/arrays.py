"""Which arrays the kernels can take; all others go to the reference."""

from __future__ import annotations

from typing import Any, TypeGuard

import numpy as np

from hvdcompress.ops.vectors import NumpyArray as Array
from hvdcompress.ops.vectors import Outer, Scalar, Sparse

ONE = np.float32(1.0)
FLOAT32 = np.dtype(np.float32)  #: compared three times as fast as the class
INDICES = (np.dtype(np.int32), np.dtype(np.int64))
INF_BITS = 0x7F800000  #: of a float32; those of NaNs lie above


def plain(*arrays: Array, dtype: Any = FLOAT32) -> bool:
    """Return whether all arrays are of this dtype and one length, contiguous, aligned and writable.

    Each kernel is so compiled only once. Lengths that differ are an error, which the reference then raises.
    """
    size = arrays[0].size
    for array in arrays:  # noqa: SIM110 (faster than all(): this is asked before each kernel)
        if array.dtype != dtype or array.size != size or not array.flags.carray:
            return False
    return True


def plain_sparse(y: Any, x: Array) -> TypeGuard[Sparse]:
    """Return whether ``y`` is a sparse vector that the kernels can add to ``x``."""
    return is_plain_sparse(y) and plain(x)


def is_plain_sparse(y: Any) -> TypeGuard[Sparse]:
    """Return whether ``y`` is a sparse vector that the kernels can read."""
    if not isinstance(y, Sparse) or not plain(y.values) or y.index.size != y.values.size:
        return False
    return y.index.dtype in INDICES and y.index.flags.carray


def plain_outer(y: Any, x: Array, factor: float) -> TypeGuard[Outer]:
    """Return whether ``y`` is a matrix of low rank that a kernel can compute in the place of ``x``, times a factor.

    The kernel multiplies once: of scale and factor, one is 1.
    """
    if not isinstance(y, Outer) or 1.0 not in (y.scale, factor) or not (plain(x) and plain(y.left) and plain(y.right)):
        return False
    return y.left.size * y.right.size == y.terms**2 * x.size and y.left.size % y.terms == y.right.size % y.terms == 0


def in_rows(y: Outer, x: Array) -> tuple[Array, Array, Array]:
    """Return both factors and ``x`` with the dimensions that they have as matrices."""
    left, right = y.left.reshape(y.terms, -1), y.right.reshape(y.terms, -1)
    return left, right, x.reshape(left.shape[1], right.shape[1])


def magnitude_bits(threshold: Scalar) -> np.int32:
    """Return the bits of a threshold that is not negative."""
    return (np.float32(threshold) + np.float32(0.0)).view(np.int32)  # + 0 turns -0 into 0


def magnitude_of(bits: Any) -> float:
    """Return the number that these bits of a float32 are."""
    return float(np.int32(bits).view(np.float32))


def int64(index: Array) -> Array:
    """Return indices as the kernels take them."""
    return np.ascontiguousarray(index, np.int64)
