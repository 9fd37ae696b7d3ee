"""Reference implementation of powersgd, independent of the package."""

from __future__ import annotations

import numpy as np


class Oracle:
    """The paper's algorithms 1 and 2 in float64, with QR as in its appendix, without the package's code.

    ``q`` [columns × r] is the first Q; as in the paper it is not orthonormalised before it is used.
    """

    def __init__(self, world_size: int, rows: int, q: np.ndarray, feedback: bool = True):
        self.q, self.feedback = q, feedback
        self.memory = [np.zeros((rows, len(q)))] * world_size

    def step(self, gradients: list[np.ndarray]) -> np.ndarray:
        delta = [g.reshape(e.shape) + e for g, e in zip(gradients, self.memory, strict=True)]
        p, _ = np.linalg.qr(sum(d @ self.q for d in delta) / len(delta))
        self.q = sum(d.T @ p for d in delta) / len(delta)
        approximation = p @ self.q.T
        if self.feedback:
            self.memory = [d - approximation for d in delta]
        return len(delta) * approximation
