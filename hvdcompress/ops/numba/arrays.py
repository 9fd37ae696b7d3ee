"""Which arrays the kernels can take; all others go to the reference."""

from __future__ import annotations

from typing import Any, TypeGuard

import numpy as np

from hvdcompress.ops.spec import NumpyArray as Array
from hvdcompress.ops.spec import Scalar, Sparse

ONE = np.float32(1.0)
INF_BITS = 0x7F800000  #: of a float32; those of NaNs lie above


def plain(*arrays: Array, dtype: Any = np.float32) -> bool:
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
    return isinstance(y, Sparse) and plain(x) and plain(y.values) and y.index.size == y.values.size


def magnitude_bits(threshold: Scalar) -> np.int32:
    """Return the bits of a threshold that is not negative."""
    return (np.float32(threshold) + np.float32(0.0)).view(np.int32)  # + 0 turns -0 into 0


def magnitude_of(bits: Any) -> float:
    """Return the number that these bits of a float32 are."""
    return float(np.int32(bits).view(np.float32))


def int64(index: Array) -> Array:
    """Return indices as the kernels take them."""
    return np.ascontiguousarray(index, np.int64)
