"""Bits in Triton: integers of a few bits (see :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

import torch

from hvdcompress.ops import torch as general
from hvdcompress.ops.triton._kernels import bits as kernels
from hvdcompress.ops.triton._kernels.launching import BLOCK, blocks, launch
from hvdcompress.ops.triton.tensors import INDICES, empty, plain, plain_bytes
from hvdcompress.ops.vectors import Array

MAX_WIDTH = 56  # the kernels hold an integer and up to 7 bits before it in 64 bits


def pack_bits(values: Array, width: int) -> Array:
    if not 0 < width <= MAX_WIDTH or not any(plain(values, dtype=dtype) for dtype in INDICES):
        return general.pack_bits(values, width)
    out = empty(-(-len(values) * width // 8), torch.uint8, values)
    given = values, out, len(values), len(out)
    launch(kernels.pack_bits, blocks(len(out)), values, *given, WIDTH=width, BLOCK=BLOCK)
    return out


def unpack_bits(buffer: Array, width: int, count: int) -> Array:
    if not 0 < width <= MAX_WIDTH or not count or not plain_bytes(buffer):
        return general.unpack_bits(buffer, width, count)
    out = empty(count, torch.int64, buffer)
    given = buffer, out, count, len(buffer)
    launch(kernels.unpack_bits, blocks(count), buffer, *given, WIDTH=width, BLOCK=BLOCK)
    return out
