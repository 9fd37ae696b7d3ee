"""Checks of whether the kernels accept a tensor. All other tensors go to ops/torch.

The host waits for the device as :mod:`hvdcompress.ops.torch` lists, with these differences: ``accumulate`` with
``Scan.above`` waits once, for the finite flag and the number of elements together. ``top_k`` and ``write``
do not wait.
"""

from __future__ import annotations

import torch

from hvdcompress.ops.shared import index_dtype
from hvdcompress.ops.vectors import Array

INDICES = (torch.int32, torch.int64)


def plain(*tensors: Array, dtype: torch.dtype = torch.float32) -> bool:
    """Return whether all tensors have this dtype and the same length, and are contiguous and not empty."""
    size = len(tensors[0])
    return size > 0 and all(t.dtype == dtype and len(t) == size and t.is_contiguous() for t in tensors)


def plain_bytes(buffer: Array) -> bool:
    """Return whether the buffer is contiguous uint8; it may be empty."""
    return buffer.dtype == torch.uint8 and buffer.is_contiguous()


def plain_sparse(index: Array, values: Array) -> bool:
    """Return whether the kernels accept the entries of a sparse vector."""
    dtype = values.dtype
    return plain(values, dtype=dtype) and plain(index, dtype=index.dtype) and len(index) == len(values)


def empty(size: int, dtype: torch.dtype, like: Array) -> Array:
    """Return an uninitialized tensor on the device of ``like``."""
    return torch.empty(size, dtype=dtype, device=like.device)


def indices(size: int, n: int, like: Array) -> Array:
    """Return an uninitialized tensor for ``size`` indices of a vector of n elements."""
    return empty(size, getattr(torch, index_dtype(n)), like)
