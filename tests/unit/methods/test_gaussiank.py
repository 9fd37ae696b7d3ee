"""Gaussian-k: top-k by a threshold from a fitted normal distribution (Shi et al. 2019, arXiv 1911.08772)."""

from __future__ import annotations

import numpy as np
import pytest

import hvdcompress
from hvdcompress.loopback import Loopback
from hvdcompress.ops.numpy import ops as reference
from hvdcompress.parts import candidates, select
from hvdcompress.testing import Trial, numbers
from tests.oracles.gaussiank import Oracle, authors_rule, sent_by_the_authors_rule
from tests.unit.methods.comparing import assert_matches_oracle
from tests.unit.methods.distributions import sent_of


@pytest.mark.parametrize("world_size,n,density", [(1, 300, 0.05), (2, 90, 0.1), (3, 2, 0.5), (4, 127, 0.3)])
def test_refine_paper_matches_the_authors_rule(world_size: int, n: int, density: float) -> None:
    net = Loopback("gaussiank", world_size=world_size, density=density, refine="paper", min_elements=1)
    kinds = [kind for kind in ("normal", "heavy", "shifted", "sparse") for _ in range(3)]
    oracle = Oracle(world_size, n, density)
    assert_matches_oracle(net, oracle, (n,), steps=12, kinds=kinds, tolerance=1e-5, exact_residuals=True)


def count_of(u: np.ndarray, density: float) -> int:
    """Return how many elements exceed the threshold of ``refine: paper``."""
    elements = candidates.Elements(u, None, None, reference)
    start = np.float32(select.gaussian_threshold(*reference.moments(u), density))
    t, _ = select.refine_paper(elements, start, select.gaussiank_limits(density, len(u)))
    return int(np.count_nonzero(np.abs(u) > t))


@pytest.mark.parametrize("density", [0.1, 0.001])
@pytest.mark.parametrize("tails", ["laplace", "student t", "lognormal with signs", "cubes"])
def test_last_mask_of_the_authors_is_sent_of_heavy_tails(tails: str, density: float) -> None:
    """The authors change the threshold a third time, after they made the mask."""
    rng, n = np.random.default_rng(5), 50_000
    u = {
        "laplace": lambda: rng.laplace(size=n),
        "student t": lambda: rng.standard_t(1.5, n),
        "lognormal with signs": lambda: rng.lognormal(0, 3, n) * rng.choice([-1, 1], n),
        "cubes": lambda: rng.normal(size=n) ** 3,
    }[tails]()
    u = u.astype(np.float32)
    assert count_of(u, density) == len(authors_rule(u, density))


@pytest.mark.parametrize("density,sigma", [(0.1, 1.0), (0.01, 1e-6), (0.01, 1e6), (0.001, 1.0)])
def test_first_threshold_is_within_ten_percent_on_normal_data(density: float, sigma: float) -> None:
    n = 1_000_000
    x = np.random.default_rng(0).normal(0, sigma, n).astype(np.float32)
    threshold = select.gaussian_threshold(*reference.moments(x), density)
    count = np.count_nonzero(np.abs(x) > np.float32(threshold))
    assert abs(count - n * density) <= 0.1 * n * density
    assert np.count_nonzero(sent_of(x, density)) == count, "a good first threshold is not refined"


@pytest.mark.parametrize("refine", ["bisect", "paper"])
def test_single_element_is_sent(refine: str) -> None:
    """In the authors' code its standard deviation is NaN, and it is never sent."""
    net = Loopback("gaussiank", world_size=2, density=0.001, refine=refine, min_elements=1)
    total = sum(net.allreduce([np.float32([2]), np.float32([4])], "w")[0][0] for _ in range(3))
    assert total == 9 if refine == "bisect" else total > 0


def test_ranks_send_different_numbers_of_entries_in_payloads_of_one_length() -> None:
    gradients = [np.zeros(2000, np.float32), numbers((2000,), 1), numbers((2000,), 2, kind="sparse")]
    gradients[2][50:] = 0
    net = Trial(hvdcompress.get_method("gaussiank", density=0.01, feedback="none"), 3)
    net.allreduce(gradients, "w", op="sum")
    kept = [net.ledger.counters(rank)["kept"] for rank in range(3)]
    assert kept[0] == 0 and kept[1] >= 14 and kept[2] == np.count_nonzero(gradients[2])
    assert len(set(net.log[0].num_bytes)) == 1


def test_elements_beyond_the_capacity_stay_in_the_residual() -> None:
    """The threshold of the paper leaves far more elements above it than ⌊4k/3⌋."""
    u = np.random.default_rng(3).standard_t(1.5, 20_000).astype(np.float32)
    out = sent_of(u, 0.001, refine="paper")
    assert np.flatnonzero(out).tolist() == sent_by_the_authors_rule(u, 0.001).tolist()
    shifted = (np.random.default_rng(4).normal(size=20_000) + 3).astype(np.float32)
    assert np.count_nonzero(sent_of(shifted, 0.001, refine="paper")) <= 26
