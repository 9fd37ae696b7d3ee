"""Reference implementation of powersgd, independent of the package."""

from __future__ import annotations

import numpy as np


class Oracle:
    """The paper's algorithms 1 and 2 in float64, with QR as in its appendix, without the package's code.

    ``q`` [columns × r] is the first Q; as in the paper it is not orthonormalised before it is used.
    """

    def __init__(self, world_size: int, q: np.ndarray, feedback: bool = True):
        self.world_size, self.q, self.feedback = world_size, q, feedback
        self.memory = [0.0] * world_size

    def step(self, gradients: list[np.ndarray]) -> np.ndarray:
        delta = [g + e for g, e in zip(gradients, self.memory, strict=True)]
        p = sum(d @ self.q for d in delta) / self.world_size
        p, _ = np.linalg.qr(p)
        self.q = sum(d.T @ p for d in delta) / self.world_size
        approximation = p @ self.q.T
        if self.feedback:
            self.memory = [d - approximation for d in delta]
        return approximation
