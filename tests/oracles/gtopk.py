"""Reference implementation of gtopk, independent of the package."""

from __future__ import annotations

import math

import numpy as np

Entries = dict[int, float]


def largest(entries: Entries, k: int) -> Entries:
    """The k largest magnitudes; among equals the lowest index."""
    return {i: entries[i] for i in sorted(entries, key=lambda i: (-abs(entries[i]), i))[:k]}


class Oracle:
    """The tree as a recursion over spans of ranks, in float64, without the package's code.

    A span of ranks is merged by its first rank, out of its left part, which is as long as the greatest power of
    two below the span, and the rest.
    """

    def __init__(self, world_size: int, n: int, density: float):
        self.world_size, self.n = world_size, n
        self.k = min(n, max(1, int(round(density * 10**9) * n // 10**9)))
        self.memory = [np.zeros(n) for _ in range(world_size)]

    def merged(self, start: int, stop: int, mine: list[Entries]) -> Entries:
        if stop - start == 1:
            return mine[start]
        middle = start + 2 ** math.ceil(math.log2(stop - start) - 1)
        left, right = self.merged(start, middle, mine), self.merged(middle, stop, mine)
        both = {i: left.get(i, 0.0) + right.get(i, 0.0) for i in left | right}
        kept = largest(both, self.k)
        for i in both.keys() - kept.keys():
            self.memory[start][i] += both[i]  # the rank that drops an entry keeps it in its residual
        return kept

    def step(self, gradients: list[np.ndarray]) -> np.ndarray:
        mine = []
        for rank, gradient in enumerate(gradients):
            self.memory[rank] += gradient
            mine.append(largest(dict(enumerate(self.memory[rank].tolist())), self.k))
            self.memory[rank][list(mine[rank])] = 0
        total = np.zeros(self.n)
        for i, value in self.merged(0, self.world_size, mine).items():
            total[i] = value
        return total
