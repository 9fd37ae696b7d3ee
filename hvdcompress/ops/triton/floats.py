"""Floats in Triton: 16-bit floats (see :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

from typing import Any

import torch

from hvdcompress.ops.shared import f32
from hvdcompress.ops.torch import TorchOps
from hvdcompress.ops.triton._kernels import floats as kernels
from hvdcompress.ops.triton._kernels.launching import BLOCK, blocks, launch
from hvdcompress.ops.triton.tensors import empty, plain
from hvdcompress.ops.vectors import FP16_MAX, Array


class FloatOps(TorchOps):
    """16-bit floats."""

    def to_fp16(self, x: Array, scale: float, limit: float = FP16_MAX, out: Array | None = None) -> tuple[Array, Any]:
        n = len(x)
        half = empty(n, torch.float16, x) if out is None else out
        if not plain(x) or not plain(half, dtype=torch.float16) or len(half) != n:
            return super().to_fp16(x, scale, limit, out)
        counts = empty(blocks(n), torch.int32, x)
        launch(kernels.to_fp16, blocks(n), x, x, f32(scale), f32(limit), half, counts, n, BLOCK=BLOCK)
        return half, counts.sum()
