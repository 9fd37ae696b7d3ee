"""Statistics in Triton: numbers about a tensor (see :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

import torch

from hvdcompress.ops import torch as general
from hvdcompress.ops.shared import moments_of
from hvdcompress.ops.spec import Array
from hvdcompress.ops.torch.tensors import host
from hvdcompress.ops.triton._kernels import statistics as kernels
from hvdcompress.ops.triton._kernels.launching import BLOCK, blocks, launch
from hvdcompress.ops.triton.tensors import empty, plain


def flag(like: Array) -> Array:
    """Return [1] int32, 0: a kernel's sign that something is not finite."""
    return torch.zeros(1, dtype=torch.int32, device=like.device)


def moments(x: Array) -> tuple[float, float]:
    if not plain(x):
        return general.moments(x)
    sums = empty(2 * blocks(len(x)), torch.float64, x)
    launch(kernels.moments, blocks(len(x)), x, x, sums, len(x), BLOCK=BLOCK)
    total, squares = host(sums.view(-1, 2).sum(0))
    return moments_of(total, squares, len(x))


def all_finite(x: Array) -> bool:
    if not plain(x) and not plain(x, dtype=torch.float64):
        return general.all_finite(x)
    bad = flag(x)
    launch(kernels.all_finite, blocks(len(x)), x, x, bad, len(x), BLOCK=BLOCK)
    return not host(bad)[0]
