"""Reference implementation of acpsgd, independent of the package."""

from __future__ import annotations

import numpy as np


class Oracle:
    """The paper's algorithm 1 in float64, without the package's code. ``q`` [columns × r] is the first Q."""

    def __init__(self, world_size: int, q: np.ndarray):
        self.world_size, self.factor, self.steps = world_size, q, 0
        self.memory = [0.0] * world_size

    def step(self, gradients: list[np.ndarray]) -> np.ndarray:
        delta = [g + e for g, e in zip(gradients, self.memory, strict=True)]
        basis, _ = np.linalg.qr(self.factor)
        if self.steps % 2:
            delta = [d.T for d in delta]
        mine = [d @ basis for d in delta]
        self.factor = sum(mine) / self.world_size
        memory = [d - part @ basis.T for d, part in zip(delta, mine, strict=True)]
        approximation = self.factor @ basis.T
        if self.steps % 2:
            memory, approximation = [m.T for m in memory], approximation.T
        self.memory, self.steps = memory, self.steps + 1
        return approximation
