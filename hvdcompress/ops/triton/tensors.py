"""Which tensors the kernels can take; all others go to ops/torch.

Different from :mod:`hvdcompress.ops.torch.tensors` is where the host waits for the device: ``accumulate``, asked
for what is above a threshold, waits once, for the flag and the number of elements together; ``top_k``, ``write`` and
``zero_where`` do not wait.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch

from hvdcompress.ops.shared import index_dtype
from hvdcompress.ops.torch.tensors import dtype_of
from hvdcompress.ops.vectors import Array, Sparse

INDICES = (torch.int32, torch.int64)


def plain(*tensors: Array, dtype: torch.dtype = torch.float32) -> bool:
    """Return whether all tensors are of this dtype and one length, contiguous, and not empty."""
    size = len(tensors[0])
    return size > 0 and all(t.dtype == dtype and len(t) == size and t.is_contiguous() for t in tensors)


def plain_bytes(buffer: Array) -> bool:
    """Return whether these are contiguous bytes, of any number."""
    return buffer.dtype == torch.uint8 and buffer.is_contiguous()


def plain_sparse(y: Any) -> TypeGuard[Sparse]:
    """Return whether ``y`` is a sparse vector that the kernels can take."""
    if not isinstance(y, Sparse) or y.index.dtype not in INDICES or not y.index.is_contiguous():
        return False
    return plain(y.values) and len(y.index) == len(y.values)


def empty(size: int, dtype: torch.dtype, like: Array) -> Array:
    """Return memory on the device of ``like``, for a kernel to fill."""
    return torch.empty(size, dtype=dtype, device=like.device)


def indices(size: int, n: int, like: Array) -> Array:
    """Return memory for indices of a vector of n elements."""
    return empty(size, dtype_of(index_dtype(n)), like)
