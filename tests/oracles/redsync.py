"""Reference implementation of redsync, independent of the package."""

from __future__ import annotations

import numpy as np

FRESH = np.float32(0)  #: no threshold is known


def num_kept(density: float, n: int) -> int:
    return min(n, max(1, int(n * density + 1e-9)))


def threshold_of_the_paper(u: np.ndarray, k: int, tolerance: float) -> np.float32:
    """The published binary search, as the authors of Gaussian-k have it: the last threshold that was tried."""
    size = np.abs(u).astype(np.float64)
    mean, most = np.float64(np.float32(size.mean())), size.max()
    left, width = 0.0, 1.0  # of the part of the way from mean to maximum that is left
    while width > tolerance:
        width /= 2
        t = np.float32(mean + (left + width) * (most - mean))
        count = np.count_nonzero(size > t)
        if k < count < 2 * k:
            break
        left += width if 2 * count >= k else 0
    return np.float32(min(t, np.nextafter(np.float32(most), np.float32(0))))


class Oracle:
    """The published search with memory and reuse, on each rank."""

    def __init__(self, world_size: int, n: int, density: float, tolerance: float, interval: int):
        self.k, self.tolerance, self.interval = num_kept(density, n), tolerance, interval
        self.memory = [np.zeros(n, np.float32) for _ in range(world_size)]
        self.thresholds = [FRESH] * world_size
        self.steps = 0

    def step(self, gradients: list[np.ndarray]) -> np.ndarray:
        total = np.zeros(len(gradients[0]))
        for rank, gradient in enumerate(gradients):
            u = gradient + self.memory[rank]
            if self.steps % self.interval == 0 or not self.thresholds[rank] > 0:
                self.thresholds[rank] = threshold_of_the_paper(u, self.k, self.tolerance)
            index = np.flatnonzero(np.abs(u) > self.thresholds[rank])[: 2 * self.k]
            total[index] += u[index]
            u[index] = 0
            self.memory[rank] = u
        self.steps += 1
        return total
