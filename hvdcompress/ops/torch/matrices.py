"""Matrices: layouts, products, orthonormal rows and principal components (see :class:`hvdcompress.ops.spec.Ops`).

The host waits for the device only inside ``torch.linalg.svd``.
"""

from __future__ import annotations

import torch

from hvdcompress.ops.shared import NEGLIGIBLE, centred, combined, hadamard, matmul, matmul_transposed
from hvdcompress.ops.torch.codes import uniform
from hvdcompress.ops.vectors import Array, NumpyArray

__all__ = [
    "combine", "hadamard", "matmul", "matmul_transposed", "orthonormalise", "permute", "principal",
]  # fmt: skip


def permute(x: Array, shape: tuple[int, ...], axes: tuple[int, ...]) -> Array:
    return x.view(shape).permute(axes).reshape(-1)


def orthonormalise(x: Array, rows: int, key: NumpyArray | None = None) -> Array:
    given = x.view(rows, -1).double()
    spare = None if key is None else (uniform(key, len(x), x) - 0.5).view(rows, -1).double()
    done = torch.zeros_like(given)
    for number in range(rows):
        row = _orthogonalised(given[number], done[:number])
        if spare is not None:
            row = torch.where(row.any(), row, _orthogonalised(spare[number], done[:number]))
        done[number] = row
    return done.float().view(-1)


def _orthogonalised(row: Array, done: Array) -> Array:
    """Orthogonalise ``row`` against ``done`` and normalise it. Return zeros if nothing remains but rounding errors."""
    row = _normalised(row, 0.0)
    for _ in range(2):  # twice, for the reason given in ops/numpy/matrices.py
        row = row - ((done * row).sum(1)[:, None] * done).sum(0)
    return _normalised(row, NEGLIGIBLE)


def _normalised(row: Array, least: float) -> Array:
    """Return a row divided by its length, or zeros if the length is not above ``least``. The host does not wait."""
    length = (row * row).sum().sqrt()
    return torch.where(length > least, row / length, torch.zeros_like(row))


def principal(x: Array, rows: int, least: int, most: int, dropped: float, centre: bool = True) -> tuple[Array, Array]:
    triangle = torch.linalg.qr(_wide(x, rows, centre).t(), mode="r").R
    left, sizes, _ = torch.linalg.svd(triangle.t(), full_matrices=False)
    beyond = sizes.square().flip(0).cumsum(0).flip(0)
    count = (beyond > dropped * beyond[:1]).sum().clamp(least, most)
    combinations = torch.zeros(most, rows, device=x.device)
    found = left.t()[:most].float()
    combinations[: len(found)] = torch.where(torch.arange(len(found), device=x.device)[:, None] < count, found, 0.0)
    return count.to(torch.int32).view(1), combinations.view(-1)


def combine(weights: Array, x: Array, rows: int, centre: bool = True) -> Array:
    return combined(weights.view(-1, rows).double(), _wide(x, rows, centre))


def _wide(x: Array, rows: int, centre: bool) -> Array:
    """Return x [rows × m] in float64, with ``centre`` minus the mean row."""
    wide = x.view(rows, -1).double()
    return centred(wide) if centre else wide
