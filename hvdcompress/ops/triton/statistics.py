"""Statistics in Triton: moments, and the check for NaN and Inf (see :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

import torch

from hvdcompress.ops.torch import TorchOps, flag
from hvdcompress.ops.triton._kernels import statistics as kernels
from hvdcompress.ops.triton._kernels.launching import BLOCK, blocks, launch
from hvdcompress.ops.triton.tensors import plain
from hvdcompress.ops.vectors import Array, Flag


def finite_flag(like: Array) -> Array:
    """Return a flag [1] int32 with the value 1; kernels set it to 0 if an element is NaN or Inf."""
    return torch.ones(1, dtype=torch.int32, device=like.device)


class StatisticsOps(TorchOps):
    """Moments, and the check for NaN and Inf."""

    def all_finite(self, x: Array) -> Flag:
        if not plain(x) and not plain(x, dtype=torch.float64):
            return super().all_finite(x)
        finite = finite_flag(x)
        launch(kernels.all_finite, blocks(len(x)), x, x, finite, len(x), BLOCK=BLOCK)
        return flag(finite)
