"""Matrices in Triton: Hadamard transforms and orthonormal rows (see :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

import torch

from hvdcompress.ops import torch as general
from hvdcompress.ops.torch.tensors import f32
from hvdcompress.ops.triton._kernels import matrices as kernels
from hvdcompress.ops.triton._kernels.launching import BLOCK, blocks, launch
from hvdcompress.ops.triton.codes import word
from hvdcompress.ops.triton.tensors import empty, plain
from hvdcompress.ops.vectors import Array, NumpyArray

MAX_BLOCK = 8192  #: maximum number of elements of a Hadamard transform's block, which one program holds
MAX_ROW = 16384  #: maximum number of elements of a row, which one program holds


def hadamard(x: Array, block: int) -> Array:
    if block > MAX_BLOCK or not plain(x):
        return general.hadamard(x, block)
    out = torch.empty_like(x)
    width = max(block, BLOCK)
    constants = {"BLOCK": block, "LOG": block.bit_length() - 1, "WIDTH": width}
    launch(kernels.hadamard, blocks(len(x), width), x, x, out, f32(block**-0.5), len(x), **constants)
    return out


def orthonormalise(x: Array, rows: int, key: NumpyArray | None = None) -> Array:
    m = len(x) // rows
    if m > MAX_ROW or not plain(x):
        return general.orthonormalise(x, rows, key)
    done = empty(len(x), torch.float64, x)
    out = torch.empty_like(x)
    width = 1 << (m - 1).bit_length()
    given = x, done, out, 0 if key is None else word(key), rows, m
    launch(kernels.orthonormalise, 1, x, *given, SPARE=key is not None, WIDTH=width)
    return out
