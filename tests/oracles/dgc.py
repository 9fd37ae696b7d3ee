"""Reference implementation of dgc, independent of the package."""

from __future__ import annotations

import numpy as np


class Oracle:
    """The paper's momentum correction and factor masking, dense and by sorting, without the package's code."""

    def __init__(self, world_size: int, n: int, density: float, momentum: float):
        self.momentum = np.float32(momentum)
        self.k = min(n, max(1, int(round(density * 10**9) * n // 10**9)))
        self.u = [np.zeros(n, np.float32) for _ in range(world_size)]  # the paper's u: velocity
        self.memory = [np.zeros(n, np.float32) for _ in range(world_size)]  # the paper's v: velocities not sent yet

    def step(self, gradients: list[np.ndarray]) -> np.ndarray:
        total = np.zeros(gradients[0].size)
        for rank, gradient in enumerate(gradients):
            u, v = self.u[rank], self.memory[rank]
            u[:] = self.momentum * u + gradient.ravel()
            v += u
            mask = np.zeros(len(u), bool)
            mask[sorted(range(len(v)), key=lambda i: (-abs(float(v[i])), i))[: self.k]] = True
            total += np.where(mask, v, 0)
            mask &= v != 0  # zeros are not sent
            v *= ~mask
            u *= ~mask
        return total
