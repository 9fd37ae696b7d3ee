"""Statistics in Triton: moments, and the check for NaN and Inf (see :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

import torch

from hvdcompress.ops import torch as general
from hvdcompress.ops.shared import moments_of
from hvdcompress.ops.torch.tensors import flag, host
from hvdcompress.ops.triton._kernels import statistics as kernels
from hvdcompress.ops.triton._kernels.launching import BLOCK, blocks, launch
from hvdcompress.ops.triton.tensors import empty, plain
from hvdcompress.ops.vectors import Array, Flag


def finite_flag(like: Array) -> Array:
    """Return a flag [1] int32 with the value 1; kernels set it to 0 if an element is NaN or Inf."""
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
    finite = finite_flag(x)
    launch(kernels.all_finite, blocks(len(x)), x, x, finite, len(x), BLOCK=BLOCK)
    return flag(finite)
