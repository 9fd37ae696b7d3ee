"""Vectors of many distributions, and what a method sends of them."""

from __future__ import annotations

import numpy as np

from hvdcompress.loopback import Loopback


def sent_of(u: np.ndarray, density: float, method: str = "gaussiank", **options: object) -> np.ndarray:
    """Return what one rank sends of u."""
    net = Loopback(method, world_size=1, density=density, min_elements=1, **options)
    out = net.allreduce([u.astype(np.float32)], "w")[0]
    np.testing.assert_array_equal(out + net.residual("w", 0), u.astype(np.float32))
    assert net.ledger.counters(0)["kept"] == np.count_nonzero(out)
    return out


def shapes() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    n = 30_000
    normal = rng.normal(size=n)
    return {
        "normal": normal,
        "laplace": rng.laplace(size=n),
        "mean-shifted": normal + 5,
        "far shifted": normal * 0.01 - 100,
        "student t, 1.1 degrees": rng.standard_t(1.1, n),
        "lognormal": rng.lognormal(0, 3, n),
        "uniform": rng.uniform(-1, 1, n),
        "two-valued": np.where(rng.random(n) < 0.5, 1.0, 2.0),
        "three spikes": np.r_[np.full(3, 1e6), normal[3:]],
        "constant": np.full(n, 0.25),
        "constant with signs": np.where(rng.random(n) < 0.5, -3.0, 3.0),
        "many ties": np.round(normal, 1),
        "denormal": normal * 1e-40,
        "huge": normal * 1e36,
        "24 powers of ten": np.sign(normal) * 10 ** rng.uniform(-12, 12, n),
    }
