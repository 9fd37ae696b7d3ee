"""Reference implementation of acpsgd, independent of the package."""

from __future__ import annotations

import numpy as np


class Oracle:
    """The paper's algorithm 1 in float64, without the package's code. ``q`` [columns × r] is the first Q."""

    def __init__(self, world_size: int, rows: int, q: np.ndarray):
        self.factor, self.steps = q, 0
        self.memory = [np.zeros((rows, len(q)))] * world_size

    def step(self, gradients: list[np.ndarray]) -> np.ndarray:
        delta = [g.reshape(e.shape) + e for g, e in zip(gradients, self.memory, strict=True)]
        if self.steps % 2:
            delta = [d.T for d in delta]
        basis, _ = np.linalg.qr(self.factor)
        mine = [d @ basis for d in delta]
        self.factor = sum(mine) / len(delta)
        memory = [d - part @ basis.T for d, part in zip(delta, mine, strict=True)]
        total = sum(mine) @ basis.T
        self.memory = [m.T for m in memory] if self.steps % 2 else memory
        self.steps += 1
        return total if self.steps % 2 else total.T
