"""Reference implementation of gradiveq, independent of the package."""

from __future__ import annotations

import numpy as np


class Oracle:
    """The paper's sections 3 and 4, with loops and in float64, without the package's code; and our departures.

    ``each``: slices sampled in a dense step; None for the first one.
    """

    def __init__(
        self, world_size: int, shape: tuple[int, ...], size: int, lt: int, lc: int, lam: float, d: int | None = None,
        each: int | None = None, order: str = "hwio", mean: bool = True, most: int | None = None,
    ):  # fmt: skip
        self.world_size, self.shape, self.size = world_size, shape, size
        self.lt, self.lc, self.lam, self.fixed = lt, lc, lam, d
        self.each, self.order, self.mean, self.most = each, order, mean, most or size
        self.t = 0

    def place(self, f: int, d: int, h: int, w: int) -> int:
        filters, depth, height, width = self.shape
        if self.order == "hwio":
            return ((h * width + w) * depth + d) * filters + f
        return ((f * depth + d) * height + h) * width + w

    def vectorise(self, g: np.ndarray) -> np.ndarray:
        out = np.zeros(g.size)
        for index in np.ndindex(*self.shape):
            out[self.place(*index)] = g[index]
        return out

    def restore(self, v: np.ndarray) -> np.ndarray:
        out = np.zeros(self.shape)
        for index in np.ndindex(*self.shape):
            out[index] = v[self.place(*index)]
        return out

    def slices(self, v: np.ndarray) -> list[np.ndarray]:
        return [v[i * self.size : (i + 1) * self.size] for i in range(v.size // self.size)]

    def step(self, gradients: list[np.ndarray]) -> np.ndarray:
        vectors = [self.vectorise(g) for g in gradients]
        total, place = sum(vectors), self.t % (self.lt + self.lc)
        if place == 0:
            self.sums: list[np.ndarray] = []
        if place < self.lt:
            self.sums.append(total)
        if place == self.lt - 1:
            self.train()
        if place >= self.lt:
            rest = total[len(total) // self.size * self.size :]
            decoded = []
            for number in range(len(total) // self.size):
                mu = self.means[number]
                q = sum(self.u.T @ (self.slices(v)[number] - mu / self.world_size) for v in vectors)  # the ring
                decoded.append(self.u @ q + mu)
            total = np.concatenate([*decoded, rest])
        self.t += 1
        return self.restore(total)

    def train(self) -> None:
        self.means = [np.mean(each, axis=0) for each in zip(*map(self.slices, self.sums), strict=True)]
        number = len(self.slices(self.sums[0]))
        taken = range(self.lt * self.each) if self.each else [step * number for step in range(self.lt)]
        g = np.array([self.slices(self.sums[k // (self.each or number)])[k % number] for k in taken])
        if not self.mean:
            self.means = [0 * mean for mean in self.means]
        else:
            g = g - g.mean(0)
        values, vectors = np.linalg.eigh(g.T @ g)
        values, vectors = np.maximum(values[::-1], 0), vectors[:, ::-1]
        self.d = next(d for d in range(1, self.size + 1) if values[d:].sum() <= self.lam * values.sum())
        self.d = min(self.d, self.most)
        if self.fixed:
            self.d = min(self.fixed, len(g) - self.mean)
        self.u = vectors[:, : self.d]
