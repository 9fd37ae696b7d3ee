"""Checks of whether the kernels accept an array. All other arrays go to the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np

from hvdcompress.ops.vectors import NumpyArray as Array
from hvdcompress.ops.vectors import Outer, Scalar, Sparse

ONE = np.float32(1.0)
FLOAT32 = np.dtype(np.float32)  #: comparing with a dtype is three times as fast as with the class
INDICES = (np.dtype(np.int32), np.dtype(np.int64))
INF_BITS = 0x7F800000  #: bits of the float32 Inf; the bits of NaNs are greater


def plain(*arrays: Array, dtype: Any = FLOAT32) -> bool:
    """Return whether all arrays have this dtype and the same length, and are contiguous, aligned and writable.

    With these conditions each kernel is compiled only once. The reference raises the error if lengths differ.
    """
    size = arrays[0].size
    for array in arrays:  # noqa: SIM110 (a loop is faster than all(), and this runs before each kernel)
        if array.dtype != dtype or array.size != size or not array.flags.carray:
            return False
    return True


def addresses(arrays: Sequence[Array]) -> Array:
    """Return the memory addresses of arrays, for a kernel that takes several; the arrays must outlive its call."""
    return np.array([array.ctypes.data for array in arrays])


def plain_sparse(y: Any, x: Array) -> TypeGuard[Sparse]:
    """Return whether the kernels can add ``y`` to ``x`` as a sparse vector."""
    return is_plain_sparse(y) and plain(x)


def is_plain_sparse(y: Any) -> TypeGuard[Sparse]:
    """Return whether the kernels can read ``y`` as a sparse vector."""
    if not isinstance(y, Sparse) or not plain(y.values) or y.index.size != y.values.size:
        return False
    return y.index.dtype in INDICES and y.index.flags.carray


def plain_outer(y: Any, x: Array, factor: float) -> TypeGuard[Outer]:
    """Return whether a kernel can write factor·y to ``x`` for a low-rank matrix ``y``.

    The kernel multiplies by one number, so ``y.scale`` or ``factor`` must be 1.
    """
    if not isinstance(y, Outer) or 1.0 not in (y.scale, factor) or not (plain(x) and plain(y.left) and plain(y.right)):
        return False
    return y.left.size * y.right.size == y.terms**2 * x.size and y.left.size % y.terms == y.right.size % y.terms == 0


def as_matrices(y: Outer, x: Array) -> tuple[Array, Array, Array]:
    """Return both factors of ``y`` and ``x``, reshaped to matrices."""
    left, right = y.left.reshape(y.terms, -1), y.right.reshape(y.terms, -1)
    return left, right, x.reshape(left.shape[1], right.shape[1])


def magnitude_bits(threshold: Scalar) -> np.int32:
    """Return the bits of a non-negative threshold."""
    return (np.float32(threshold) + np.float32(0.0)).view(np.int32)  # −0 + 0 is 0


def int64(index: Array) -> Array:
    """Return indices as contiguous int64, a copy if necessary."""
    return np.ascontiguousarray(index, np.int64)
