"""Input vectors for tests of the array ops."""

from __future__ import annotations

import numpy as np

from hvdcompress.ops.shared import mix

MAX = float(np.finfo(np.float32).max)
TINY = float(np.float32(1e-45))  #: the smallest denormal
LARGE = [1e37, MAX, -MAX]
SMALL = [0.0, -0.0, TINY, -TINY, 1e-40, 1.1754944e-38]
SPECIAL = [*SMALL, 6e-8, 6.1e-5, 0.1, -0.1, 1.0, -1.0, 65504.0, 65520.0, *LARGE]


def key(number: int) -> np.ndarray:
    """Return the key [1] uint32 of a random stream."""
    return mix(np.array([number], np.uint32))


def vector(kind: str, n: int, seed: int = 0) -> np.ndarray:
    """Return [n] float32 of one kind: "constant", "ties", "special", "heavy" or "normal"."""
    rng = np.random.default_rng([seed, n])
    if kind == "constant":
        return np.full(n, 0.1, np.float32)
    if kind == "ties":
        return rng.integers(-2, 3, n).astype(np.float32)
    if kind == "special":
        return rng.choice(np.array(SPECIAL, np.float32), n)
    if kind == "heavy":
        return (rng.normal(size=n) ** 9).astype(np.float32)
    return rng.normal(size=n).astype(np.float32)


def every(step: int, x: np.ndarray) -> np.ndarray:
    """Return the indices of every ``step``-th element of x."""
    return np.arange(0, x.size, step, dtype=np.int32)


def sizes_of_parts(n: int) -> list[int]:
    """Return sizes that add up to n; some are 0."""
    return [0, n // 3, 0, n // 2 - n // 3, n - n // 2]


def damaged_norms(x: np.ndarray, count: int) -> np.ndarray:
    """Return norms [count] as a damaged payload may contain them."""
    return np.resize(np.concatenate([np.float32([np.nan, -np.inf, np.inf, -1]), x]), count)
