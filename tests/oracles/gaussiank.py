"""Reference implementation of gaussiank, independent of the package."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np


def authors_rule(u: np.ndarray, density: float) -> np.ndarray:
    """Return the positions that GaussianK-SGD's code sends of u, ascending: the last mask made, not the last threshold.

    Its t is μ + z·σ of u. Ours is |μ| + z·σ, which is the authors' of u or of −u, whichever has a mean above 0.
    """
    if len(u) == 1:
        return np.arange(int(u[0] != 0))  # theirs is never sent
    exact = u.astype(np.float64) * (1 if math.fsum(map(float, u)) >= 0 else -1)
    k = max(int(len(u) * density + 1e-9), 1)
    t = exact.mean() + NormalDist().inv_cdf(1 - density / 2) * exact.std(ddof=1)
    rounds = 0
    while rounds < 3:
        mask = np.abs(u) > np.float32(t)
        if mask.sum() < 2 * k / 3:
            t *= 0.5
        elif mask.sum() > 4 * k / 3:
            t *= 1.5
        else:
            break
        rounds += 1
    return np.flatnonzero(mask)


def sent_by_the_authors_rule(u: np.ndarray, density: float) -> np.ndarray:
    """Return the first ⌊4k/3⌋ of the positions: the fixed capacity; the rest stays in the residual."""
    k = min(len(u), max(1, int(len(u) * density + 1e-9)))
    return authors_rule(u, density)[: min(len(u), max(1, 4 * k // 3))]


class Oracle:
    """The authors' rule with memory, dense, on each rank; entries of different ranks sum."""

    def __init__(self, world_size: int, n: int, density: float):
        self.density, self.memory = density, [np.zeros(n, np.float32) for _ in range(world_size)]

    def step(self, gradients: list[np.ndarray]) -> np.ndarray:
        total = np.zeros(len(gradients[0]))
        for rank, gradient in enumerate(gradients):
            u = gradient + self.memory[rank]
            for i in sent_by_the_authors_rule(u, self.density):
                total[i] += float(u[i])
                u[i] = 0
            self.memory[rank] = u
        return total
