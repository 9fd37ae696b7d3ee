"""Vectors of many distributions, and the elements that a method sends of them."""

from __future__ import annotations

import numpy as np

from hvdcompress.loopback import Loopback


def sent_of(u: np.ndarray, density: float, method: str = "gaussiank", **options: object) -> np.ndarray:
    """Return the elements that one rank sends of u, and zeros elsewhere."""
    net = Loopback(method, world_size=1, density=density, min_elements=1, **options)
    u = u.astype(np.float32)
    out = net.allreduce([u.reshape(-1, 1)], "w")[0].ravel()  # DGC sends vectors uncompressed
    np.testing.assert_array_equal(out + net.residual("w", 0).ravel(), u)
    assert net.ledger.counters(0)["kept"] == np.count_nonzero(out)
    return out


def assert_largest_are_sent(u: np.ndarray, out: np.ndarray) -> None:
    """No element left out is larger than one that is sent."""
    sent = out != 0
    assert np.abs(u[~sent]).max(initial=0) <= np.abs(u[sent]).min(initial=np.inf)


def distributions() -> dict[str, np.ndarray]:
    """Return vectors [30 000] by the name of their distribution."""
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
