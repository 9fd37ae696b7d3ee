"""Floats in Triton: 16-bit floats (see :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

from typing import Any

import torch

from hvdcompress.ops import torch as general
from hvdcompress.ops.torch.tensors import f32
from hvdcompress.ops.triton._kernels import floats as kernels
from hvdcompress.ops.triton._kernels.launching import BLOCK, blocks, launch
from hvdcompress.ops.triton.tensors import empty, plain
from hvdcompress.ops.vectors import FP16_MAX, Array


def to_fp16(x: Array, scale: float, limit: float = FP16_MAX, out: Array | None = None) -> tuple[Array, Any]:
    n = len(x)
    half = empty(n, torch.float16, x) if out is None else out
    if not plain(x) or not plain(half, dtype=torch.float16) or len(half) != n:
        return general.to_fp16(x, scale, limit, out)
    counts = empty(blocks(n), torch.int32, x)
    launch(kernels.to_fp16, blocks(n), x, x, f32(scale), f32(limit), half, counts, n, BLOCK=BLOCK)
    return half, counts.sum()


def from_fp16(x: Array, scale: float) -> Array:
    if not plain(x, dtype=torch.float16):
        return general.from_fp16(x, scale)
    out = empty(len(x), torch.float32, x)
    launch(kernels.from_fp16, blocks(len(x)), x, x, f32(scale), out, len(x), BLOCK=BLOCK)
    return out


def to_bf16(x: Array, out: Array | None = None) -> Array:
    if not plain(x) or out is not None:
        return general.to_bf16(x, out)
    bits = empty(len(x), torch.int16, x)
    launch(kernels.to_bf16, blocks(len(x)), x, x, bits, len(x), BLOCK=BLOCK)
    return bits


def from_bf16(bits: Array) -> Array:
    if not plain(bits, dtype=torch.int16):
        return general.from_bf16(bits)
    out = empty(len(bits), torch.float32, bits)
    launch(kernels.from_bf16, blocks(len(bits)), bits, bits, out, len(bits), BLOCK=BLOCK)
    return out
