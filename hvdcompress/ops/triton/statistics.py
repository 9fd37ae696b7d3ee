"""Statistics in Triton: numbers about a tensor (see :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

import torch

from hvdcompress.ops import torch as general
from hvdcompress.ops.shared import moments_of
from hvdcompress.ops.torch.tensors import flag, host
from hvdcompress.ops.triton._kernels import statistics as kernels
from hvdcompress.ops.triton._kernels.launching import BLOCK, blocks, launch
from hvdcompress.ops.triton.tensors import empty, plain
from hvdcompress.ops.vectors import Array, Flag


def finite_so_far(like: Array) -> Array:
    """Return [1] int32, 1: a kernel sets it to 0 where it finds what is not finite."""
    return torch.ones(1, dtype=torch.int32, device=like.device)


def moments(x: Array) -> tuple[float, float]:
    if not plain(x):
        return general.moments(x)
    sums = empty(2 * blocks(len(x)), torch.float64, x)
    launch(kernels.moments, blocks(len(x)), x, x, sums, len(x), BLOCK=BLOCK)
    total, squares = host(sums.view(-1, 2).sum(0))
    return moments_of(total, squares, len(x))


def all_finite(x: Array) -> Flag:
    if not plain(x) and not plain(x, dtype=torch.float64):
        return general.all_finite(x)
    finite = finite_so_far(x)
    launch(kernels.all_finite, blocks(len(x)), x, x, finite, len(x), BLOCK=BLOCK)
    return flag(finite)
