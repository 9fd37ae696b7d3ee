"""arctopk: rows that all ranks select by a summed sketch (Chen et al. 2025, arXiv 2510.26709)."""

from __future__ import annotations

import numpy as np
import pytest

from hvdcompress.loopback import Loopback
from hvdcompress.method import Context, TensorSpec
from hvdcompress.parts import seed
from hvdcompress.testing import numbers


def signs(m: int, r: int, step: int) -> np.ndarray:
    """Return the random matrix V [m × r] of a step."""
    key = seed.shared_key(Context(0, 1, step, TensorSpec("w", (1,))))
    return np.where(seed.uniform(key, r * m).reshape(r, m) < 0.5, 1.0, -1.0).T


@pytest.mark.parametrize(
    "world_size,n,density,row,sketch",
    [(1, 40, 0.1, 4, 1), (2, 57, 0.2, 5, 2), (3, 3, 0.5, 4, 1), (3, 61, 0.1, 1, 3), (4, 33, 1.0, 8, 1)],
)
def test_matches_a_dense_computation(world_size: int, n: int, density: float, row: int, sketch: int) -> None:
    net = Loopback("arctopk", world_size=world_size, density=density, row=row, sketch=sketch, min_elements=1)
    memory = [np.zeros(n) for _ in range(world_size)]
    rows = n // row
    k = min(rows, max(1, int(rows * density + 1e-9)))
    for step in range(12):
        gradients = [numbers((n,), rank, step) for rank in range(world_size)]
        memory = [m + g for m, g in zip(memory, gradients, strict=True)]
        total = np.sum(memory, axis=0)
        norms = np.linalg.norm(total[: rows * row].reshape(rows, row) @ signs(row, sketch, step), axis=1)
        sent = np.ones(n, bool)
        sent[: rows * row] = np.isin(np.arange(rows), np.argsort(-norms)[:k]).repeat(row)
        expected = np.where(sent, total, 0)
        memory = [np.where(sent, 0, m) for m in memory]
        np.testing.assert_allclose(net.allreduce(gradients, "w", op="sum")[0], expected, atol=1e-4)
        for rank in range(world_size):
            np.testing.assert_allclose(net.residual("w", rank), memory[rank], atol=1e-4)


def test_rows_are_those_of_the_sum() -> None:
    """What the ranks disagree about is not sent, however large it is on each of them."""
    gradients = [np.ones(64, np.float32), np.ones(64, np.float32)]
    gradients[0][:8], gradients[1][:8] = 100, -100
    net = Loopback("arctopk", world_size=2, density=0.125, row=8, sketch=64, min_elements=1)
    out = net.allreduce(gradients, "w")[0]
    assert not out[:8].any() and np.count_nonzero(out) == 8


def test_sketches_estimate_the_norms_of_rows() -> None:
    x = numbers((4, 32), 1)
    found = np.mean([(x @ signs(32, 2, step)) ** 2 for step in range(3000)], axis=(0, 2))
    np.testing.assert_allclose(found, (x**2).sum(1), rtol=0.1)
