"""Matrices: layouts, products, orthonormal rows and principal components (see :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdcompress.ops.numpy.codes import uniform
from hvdcompress.ops.numpy.statistics import fold
from hvdcompress.ops.shared import NEGLIGIBLE, centred, combined, hadamard, matmul, matmul_transposed
from hvdcompress.ops.vectors import NumpyArray as Array

__all__ = [
    "combine", "hadamard", "matmul", "matmul_transposed", "orthonormalise", "permute", "principal",
]  # fmt: skip


def permute(x: Array, shape: tuple[int, ...], axes: tuple[int, ...]) -> Array:
    return x.reshape(shape).transpose(axes).ravel()


def orthonormalise(x: Array, rows: int, key: Array | None = None) -> Array:
    given = x.reshape(rows, -1).astype(np.float64)
    done = np.zeros_like(given)
    for number in range(rows):
        row = _orthogonalised(given[number], done[:number])
        if key is not None and not row.any():
            row = _orthogonalised(drawn(key, number, given.shape[1]), done[:number])
        done[number] = row
    return done.astype(np.float32).ravel()


def drawn(key: Array, number: int, size: int) -> Array:
    """Return row ``number`` [size] float64 of the random matrix whose rows replace zero rows."""
    return (uniform(key, size, key, number * size) - np.float32(0.5)).astype(np.float64)


def _orthogonalised(row: Array, done: Array) -> Array:
    """Orthogonalise ``row`` against ``done`` and normalise it. Return zeros if nothing remains but rounding errors."""
    row = _normalised(row, 0.0)
    # Twice is enough (Giraud et al. 2005). After one pass, the rounding error of a large projection remains.
    for _ in range(2):
        for other in done:
            row = row - _dot(other, row) * other
    return _normalised(row, NEGLIGIBLE)


def _normalised(row: Array, least: float) -> Array:
    """Return a row divided by its length, or zeros if the length is not above ``least``."""
    length = np.sqrt(_dot(row, row))
    return row / length if length > least else np.zeros_like(row)


def _dot(x: Array, y: Array) -> Any:
    """Return the scalar product, added in the order of :func:`fold`."""
    return fold((x * y)[None])[0]


def principal(x: Array, rows: int, least: int, most: int, dropped: float, centre: bool = True) -> tuple[Array, Array]:
    # Rᵀ has the same left singular vectors and values as x, but only as many columns as rows
    triangle: Any = np.linalg.qr(_wide(x, rows, centre).T, mode="r")
    left, sizes, _ = np.linalg.svd(triangle.T, full_matrices=False)
    energy = np.square(sizes)
    beyond = np.cumsum(energy[::-1])[::-1]  # beyond[i]: energy that is dropped with i components
    count = int(np.clip(np.count_nonzero(beyond > dropped * beyond[:1]), least, most))
    combinations = np.zeros((most, rows), np.float32)
    combinations[:count] = left.T[:count]
    return np.array([count], np.int32), combinations.ravel()


def combine(weights: Array, x: Array, rows: int, centre: bool = True) -> Array:
    return combined(weights.reshape(-1, rows).astype(np.float64), _wide(x, rows, centre))


def _wide(x: Array, rows: int, centre: bool) -> Array:
    """Return x [rows × m] in float64, with ``centre`` minus the mean row."""
    wide = x.reshape(rows, -1).astype(np.float64)
    return centred(wide) if centre else wide
