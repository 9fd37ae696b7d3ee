"""Reference implementation of signsgd, independent of the package."""

from __future__ import annotations

import numpy as np


class Oracle:
    """The paper's Algorithm 1 on each rank, in float64, without the package's code."""

    def __init__(self, world_size: int, n: int):
        self.memory = [np.zeros(n) for _ in range(world_size)]

    def step(self, gradients: list[np.ndarray]) -> np.ndarray:
        total = np.zeros(len(self.memory[0]))
        for rank, gradient in enumerate(gradients):
            p = self.memory[rank] + gradient
            delta = np.where(p < 0, -1.0, 1.0) * np.abs(p).mean()  # sign(0) is sent as +
            self.memory[rank] = p - delta
            total += delta
        return total
