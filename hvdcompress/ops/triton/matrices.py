"""Matrices in Triton: Hadamard transforms and orthonormal rows (see :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

import torch

from hvdcompress.ops.torch import TorchOps, signed
from hvdcompress.ops.triton._kernels import matrices as kernels
from hvdcompress.ops.triton._kernels.launching import launch
from hvdcompress.ops.triton.tensors import empty, plain
from hvdcompress.ops.vectors import Array, NumpyArray

MAX_BLOCK = 8192  #: maximum number of elements of a Hadamard transform's block, which one program holds
MAX_ROW = 16384  #: maximum number of elements of a row, which one program holds


class MatrixOps(TorchOps):
    """Orthonormal rows."""

    def orthonormalise(self, x: Array, rows: int, key: NumpyArray | None = None) -> Array:
        m = len(x) // rows
        if m > MAX_ROW or not plain(x):
            return super().orthonormalise(x, rows, key)
        done = empty(len(x), torch.float64, x)
        out = torch.empty_like(x)
        width = 1 << (m - 1).bit_length()
        given = x, done, out, 0 if key is None else signed(int(key[0])), rows, m
        launch(kernels.orthonormalise, 1, x, *given, SPARE=key is not None, WIDTH=width)
        return out
