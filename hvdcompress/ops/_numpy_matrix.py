"""Verbs of the reference for matrices: products, layouts, orthonormal rows, principal components.

A matrix is its flat memory, row by row, and a number of rows: a and b below have ``len // rows`` columns. Factors
lie as *rows*, so that the first few of them are the first part of the memory. ``numpy.py`` hands these verbs on.

What is computed anew on every rank from what all of them have (``outer_sum``, ``orthonormalise``, ``combine``)
adds in a fixed order and uses no matrix library, whose sums depend on the processor and its threads: ranks of
unlike machines then still agree to the bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

__all__ = ["combine", "matmul", "matmul_transposed", "orthonormalise", "outer_sum", "permute", "principal"]

NEGLIGIBLE = 1e-6  #: what is left of a row, relative to it, that is the rounding of float32 and no direction


def permute(x: Array, shape: tuple[int, ...], axes: tuple[int, ...]) -> Array:
    """x [n], read as an array of ``shape``, with its axes in another order [n]; may be a view."""
    return x.reshape(shape).transpose(axes).ravel()


def matmul(a: Array, b: Array, rows: int, columns: int) -> Array:
    """a [rows × m] · b [m × columns] -> [rows · columns] float32."""
    return (a.reshape(rows, -1) @ b.reshape(-1, columns)).ravel()


def matmul_transposed(a: Array, b: Array, rows: int, columns: int) -> Array:
    """a [rows × m] · (b [columns × m])ᵀ -> [rows · columns] float32."""
    return (a.reshape(rows, -1) @ b.reshape(columns, -1).T).ravel()


def outer_sum(p: Array, q: Array, count: int) -> Array:
    """Σ_i p_i q_iᵀ over the ``count`` rows p_i [m] and q_i [k] -> [m · k] float32, added in their order."""
    left, right = p.reshape(count, -1, 1), q.reshape(count, 1, -1)
    total = left[0] * right[0]
    for column, row in zip(left[1:], right[1:], strict=True):
        total += column * row
    return total.ravel()


def orthonormalise(x: Array, rows: int, fill: Array | None = None) -> Array:
    """Orthonormal rows [rows × m] float32 with the span of those of x, float32 or float64: Gram-Schmidt in float64.

    A row that is zero, or depends on those before it, becomes what is left of ``fill``'s row; or zero without one.
    """
    given = x.reshape(rows, -1).astype(np.float64)
    spare = np.zeros_like(given) if fill is None else fill.reshape(rows, -1).astype(np.float64)
    done = np.zeros_like(given)
    for number in range(rows):
        left = _remainder(given[number], done[:number])
        done[number] = left if left.any() else _remainder(spare[number], done[:number])
    return done.astype(np.float32).ravel()


def _remainder(row: Array, done: Array) -> Array:
    """What the orthonormal rows ``done`` leave of a row, at length 1; zeros where that is negligible."""
    length = np.sqrt((row * row).sum())
    if length == 0:
        return row
    row = row / length
    for _ in range(2):  # twice is enough (Giraud et al. 2005): once leaves the rounding of a large part removed
        row = row - ((done * row).sum(axis=1)[:, None] * done).sum(axis=0)
    length = np.sqrt((row * row).sum())
    return row / length if length > NEGLIGIBLE else np.zeros_like(row)


def principal(x: Array, rows: int, least: int, most: int, dropped: float) -> tuple[Array, Array]:
    """Principal components of the rows of x [rows × m], about their mean, as combinations of these rows.

    Returns d [1] int32, the least number of components, within least … most, that leaves out a share of at
    most ``dropped`` of the variance, and combinations [most × rows] float32, of which those after d are zero.
    """
    triangle: Any = np.linalg.qr(_centred(x, rows).T, mode="r")  # has the same left vectors, in few columns
    left, sizes, _ = np.linalg.svd(triangle.T, full_matrices=False)
    energy = np.square(sizes)
    beyond = np.cumsum(energy[::-1])[::-1]  # what is left out if the components before this one are kept
    count = int(np.clip(np.count_nonzero(beyond > dropped * beyond[:1]), least, most))
    combinations = np.zeros((most, rows), np.float32)
    combinations[:count] = left.T[:count]
    return np.array([count], np.int32), combinations.ravel()


def combine(weights: Array, x: Array, rows: int) -> Array:
    """Combinations [count × m] float64 of the rows of x [rows × m], less their mean; ``weights`` [count × rows]."""
    centred = _centred(x, rows)
    shares = weights.reshape(-1, rows).astype(np.float64)
    total = np.zeros((len(shares), centred.shape[1]))
    for share, row in zip(shares.T, centred, strict=True):
        total += share[:, None] * row
    return total.ravel()


def _centred(x: Array, rows: int) -> Array:
    """x [rows × m] in float64 less the mean of its rows, which are added in their order."""
    wide = x.reshape(rows, -1).astype(np.float64)
    total = np.zeros(wide.shape[1])
    for row in wide:
        total += row
    return wide - total / rows
