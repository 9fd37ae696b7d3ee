"""Matrices, compiled: products with few rows and orthonormal rows (see :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

import numpy as np

from hvdcompress.ops.numba._kernels import matrices as kernels
from hvdcompress.ops.numba.arrays import plain
from hvdcompress.ops.numba.threads import in_ranges
from hvdcompress.ops.numpy import NumpyOps
from hvdcompress.ops.shared import NEGLIGIBLE
from hvdcompress.ops.vectors import NumpyArray as Array

FEW_ROWS = range(2, 9)  #: row counts for which ``products`` beats the matrix library, on large tensors
FEWEST_ROWS = range(2, 4)  #: the same for ``combinations``
LARGE = 1 << 18  #: number of elements of a large tensor


class MatrixOps(NumpyOps):
    """Products with few rows, orthonormal rows, Hadamard transforms."""

    def matmul(self, a: Array, b: Array, rows: int, columns: int) -> Array:
        if rows not in FEWEST_ROWS or b.size < LARGE or not (plain(a) and plain(b)):
            return super().matmul(a, b, rows, columns)
        out = np.empty((rows, columns), np.float32)
        kernels.combinations(a.reshape(rows, -1), b.reshape(-1, columns), out)
        return out.ravel()

    def matmul_transposed(self, a: Array, b: Array, rows: int, columns: int) -> Array:
        if rows not in FEW_ROWS or b.size < LARGE or not (plain(a) and plain(b)):
            return super().matmul_transposed(a, b, rows, columns)
        out = np.empty((rows, columns), np.float32)
        kernels.products(a.reshape(rows, -1), b.reshape(columns, -1), out)
        return out.ravel()

    def hadamard(self, x: Array, block: int) -> Array:
        if not plain(x):
            return super().hadamard(x, block)
        out = np.empty_like(x)
        scale = np.float32(block**-0.5)
        in_ranges(lambda start, stop: kernels.hadamard(x[start:stop], scale, block, out[start:stop]), x.size, block)
        return out

    def orthonormalise(self, x: Array, rows: int, key: Array | None = None) -> Array:
        done = x.reshape(rows, -1).astype(np.float64)
        number = kernels.orthogonalise_from(done, 0, NEGLIGIBLE)
        while number < rows:
            if key is not None:
                done[number] = self._drawn(key, number, done.shape[1])
                kernels.orthogonalise(done, number, NEGLIGIBLE)
            number = kernels.orthogonalise_from(done, number + 1, NEGLIGIBLE)
        return done.astype(np.float32).ravel()
