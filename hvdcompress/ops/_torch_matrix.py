"""Verbs of the torch backend for matrices; ``_numpy_matrix.py`` says what each one does.

Products and principal components differ from the reference's by rounding; the rest adds in the same order.
Nothing here waits for the device, but for what ``torch.linalg.svd`` does inside.
"""

from __future__ import annotations

import torch

from hvdcompress.method import Array
from hvdcompress.ops._numpy_matrix import NEGLIGIBLE

__all__ = ["combine", "matmul", "matmul_transposed", "orthonormalise", "outer_sum", "permute", "principal"]


def permute(x: Array, shape: tuple[int, ...], axes: tuple[int, ...]) -> Array:
    """x [n], read as an array of ``shape``, with its axes in another order [n]; may be a view."""
    return x.view(shape).permute(axes).reshape(-1)


def matmul(a: Array, b: Array, rows: int, columns: int) -> Array:
    """a [rows × m] · b [m × columns] -> [rows · columns] float32."""
    return (a.view(rows, -1) @ b.view(-1, columns)).view(-1)


def matmul_transposed(a: Array, b: Array, rows: int, columns: int) -> Array:
    """a [rows × m] · (b [columns × m])ᵀ -> [rows · columns] float32."""
    return (a.view(rows, -1) @ b.view(columns, -1).t()).view(-1)


def outer_sum(p: Array, q: Array, count: int) -> Array:
    """Σ_i p_i q_iᵀ over the ``count`` rows p_i [m] and q_i [k] -> [m · k] float32, added in their order."""
    left, right = p.view(count, -1, 1), q.view(count, 1, -1)
    total = left[0] * right[0]
    for column, row in zip(left[1:], right[1:], strict=True):
        total += column * row  # two kernels: addcmul may fuse them, and round once where the reference rounds twice
    return total.view(-1)


def orthonormalise(x: Array, rows: int, fill: Array | None = None) -> Array:
    """Orthonormal rows [rows × m] float32 with the span of those of x, float32 or float64: Gram-Schmidt in float64.

    A row that is zero, or depends on those before it, becomes what is left of ``fill``'s row; or zero without one.
    """
    given = x.view(rows, -1).double()
    spare = None if fill is None else fill.view(rows, -1).double()
    done = torch.zeros_like(given)
    for number in range(rows):
        left = _remainder(given[number], done[:number])
        if spare is not None:
            left = torch.where(left.any(), left, _remainder(spare[number], done[:number]))
        done[number] = left
    return done.float().view(-1)


def _remainder(row: Array, done: Array) -> Array:
    """What the orthonormal rows ``done`` leave of a row, at length 1; zeros where that is negligible."""
    row = _at_length_1(row, 0.0)
    for _ in range(2):
        row = row - ((done * row).sum(1)[:, None] * done).sum(0)
    return _at_length_1(row, NEGLIGIBLE)


def _at_length_1(row: Array, least: float) -> Array:
    """The row divided by its length; zeros where that is not above ``least``. The host need not know which."""
    length = (row * row).sum().sqrt()
    return torch.where(length > least, row / length, torch.zeros_like(row))


def principal(x: Array, rows: int, least: int, most: int, dropped: float) -> tuple[Array, Array]:
    """Principal components of the rows of x [rows × m], about their mean, as combinations of these rows.

    Returns d [1] int32, the least number of components, within least … most, that leaves out a share of at
    most ``dropped`` of the variance, and combinations [most × rows] float32, of which those after d are zero.
    """
    triangle = torch.linalg.qr(_centred(x, rows).t(), mode="r").R
    left, sizes, _ = torch.linalg.svd(triangle.t(), full_matrices=False)
    beyond = sizes.square().flip(0).cumsum(0).flip(0)
    count = (beyond > dropped * beyond[:1]).sum().clamp(least, most)
    combinations = torch.zeros(most, rows, device=x.device)
    found = left.t()[:most].float()
    combinations[: len(found)] = torch.where(torch.arange(len(found), device=x.device)[:, None] < count, found, 0.0)
    return count.to(torch.int32).view(1), combinations.view(-1)


def combine(weights: Array, x: Array, rows: int) -> Array:
    """Combinations [count × m] float64 of the rows of x [rows × m], less their mean; ``weights`` [count × rows]."""
    centred = _centred(x, rows)
    shares = weights.view(-1, rows).double()
    total = torch.zeros(len(shares), centred.shape[1], dtype=torch.float64, device=x.device)
    for share, row in zip(shares.t(), centred, strict=True):
        total += share[:, None] * row
    return total.view(-1)


def _centred(x: Array, rows: int) -> Array:
    """x [rows × m] in float64 less the mean of its rows, which are added in their order."""
    wide = x.view(rows, -1).double()
    total = torch.zeros_like(wide[0])
    for row in wide:
        total += row
    return wide - total / rows
