"""Reference implementation of scalecom, independent of the package."""

from __future__ import annotations

import numpy as np


class Oracle:
    """The paper's algorithm, dense and with loops, without the package's code."""

    def __init__(self, world_size: int, n: int, density: float, beta: float, select: str = "chunk"):
        self.world_size, self.n, self.density, self.beta, self.select = world_size, n, density, beta, select
        self.memory = [np.zeros(n) for _ in range(world_size)]
        self.t = 0

    def clt(self, u: np.ndarray) -> list[int]:
        if self.select == "exact":
            k = min(self.n, max(1, int(self.n * self.density + 1e-9)))
            return sorted(sorted(range(self.n), key=lambda i: (-abs(u[i]), i))[:k])
        chunk = max(1, round(1 / self.density))
        index = []
        for start in range(0, self.n, chunk):  # the last chunk may be shorter, and sends one element too
            stop = min(start + chunk, self.n)
            index.append(max(range(start, stop), key=lambda i: (abs(u[i]), -i)))
        return index

    def step(self, gradients: list[np.ndarray]) -> np.ndarray:
        u = [m + g for m, g in zip(self.memory, gradients, strict=True)]
        leader = self.t % self.world_size
        index = self.clt(u[leader])
        total = np.zeros(self.n)
        for rank in range(self.world_size):
            sent = np.zeros(self.n)
            sent[index] = u[rank][index]
            total += sent
            self.memory[rank] = (1 - self.beta) * self.memory[rank] + self.beta * (u[rank] - sent)  # eq. 5
        self.t += 1
        return total
