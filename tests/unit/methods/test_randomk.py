"""randomk: the same k random positions on all ranks; values are summed, and no index is sent (Stich et al. 2018)."""

from __future__ import annotations

import numpy as np
import pytest

import hvdcompress
from hvdcompress.loopback import Loopback
from hvdcompress.method import Context, TensorSpec
from hvdcompress.parts import seed
from hvdcompress.testing import numbers
from tests.unit.methods.comparing import assert_matches_oracle


def chosen(n: int, k: int, step: int, key: int = 0, name: str = "w") -> np.ndarray:
    """Return the indices that are sent."""
    return seed.distinct_indices(seed.shared_key(Context(0, 1, step, TensorSpec(name, (n,)), key)), k, n)


class Oracle:
    """rand_k with memory, dense. The positions come from the package."""

    def __init__(self, world_size: int, n: int, density: float):
        self.memory = [np.zeros(n, np.float32) for _ in range(world_size)]
        self.k, self.steps = max(1, int(n * density + 1e-9)), 0

    def step(self, gradients: list[np.ndarray]) -> np.ndarray:
        index = chosen(len(gradients[0]), self.k, self.steps, key=11)
        self.steps += 1
        u = np.add(self.memory, gradients)
        total = np.zeros(u.shape[1])
        total[index] = u[:, index].sum(axis=0, dtype=np.float64)
        u[:, index] = 0
        self.memory = list(u)
        return total


@pytest.mark.parametrize("world_size,n,density", [(1, 60, 0.1), (2, 7, 0.5), (4, 101, 0.03), (5, 1, 1.0)])
def test_matches_the_oracle(world_size: int, n: int, density: float) -> None:
    net = Loopback("randomk", world_size=world_size, density=density, min_elements=1, seed=11)
    assert_matches_oracle(net, Oracle(world_size, n, density), (n,), exact_residuals=True)


@pytest.mark.parametrize("n,k", [(2, 1), (10, 3), (64, 5), (1000, 7)])
def test_indices_are_uniform_over_many_steps(n: int, k: int) -> None:
    """Chi-square with n − 1 degrees of freedom, at six standard deviations."""
    steps = max(1200, 20 * n // k)
    count = np.bincount(np.concatenate([chosen(n, k, step) for step in range(steps)]), minlength=n)
    expected = steps * k / n
    # drawing without replacement makes each count's variance k/n·(1 − k/n) a step, not k/n
    chi_square = ((count - expected) ** 2).sum() / (expected * (1 - k / n)) * (n - 1) / n
    assert abs(chi_square - (n - 1)) < 6 * np.sqrt(2 * (n - 1)) + 6, chi_square


def test_pairs_of_indices_are_independent() -> None:
    """Neighbours are drawn together as often as any other pair."""
    n, k, steps = 50, 5, 3000
    near = sum(int((np.diff(chosen(n, k, step)) == 1).sum()) for step in range(steps))
    expected = steps * (n - 1) * (k * (k - 1)) / (n * (n - 1))
    assert abs(near - expected) < 6 * np.sqrt(expected)


def test_indices_above_two_to_the_24_are_drawn() -> None:
    """Sampling through float32 would give only even indices beyond 2^24."""
    n = 2**24 + 2**20 + 3
    index = chosen(n, 200_000, 1)
    high = index[index >= 2**24]
    assert abs(len(high) / 200_000 - (n - 2**24) / n) < 0.005
    assert 0.45 < (high % 2).mean() < 0.55


def test_indices_change_with_step_seed_and_name() -> None:
    base = chosen(1000, 10, 0).tolist()
    for other in (chosen(1000, 10, 1), chosen(1000, 10, 0, key=1), chosen(1000, 10, 0, name="v")):
        assert base != other.tolist()


def test_unbiased_scales_by_n_over_k_and_averages_to_the_gradient() -> None:
    n, steps = 30, 1500
    g = numbers((n,), 5)
    net = Loopback("randomk", world_size=1, density=0.2, feedback="none", unbiased=True, min_elements=1)
    outs = np.array([net.allreduce([g], "w")[0] for _ in range(steps)], np.float64)
    np.testing.assert_allclose(outs, np.where(outs != 0, 5 * g, 0), rtol=1e-6)
    # variance (n/k − 1)·g² an element
    assert (np.abs(outs.mean(axis=0) - g) <= 6 * np.abs(g) * np.sqrt(4 / steps) + 1e-6).all()
    np.testing.assert_allclose(((outs - g) ** 2).sum(axis=1).mean(), 4 * (g**2).sum(), rtol=0.1)


def test_unbiased_needs_feedback_none() -> None:
    with pytest.raises(ValueError, match=r'unbiased.*feedback: "none"'):
        hvdcompress.get_method("randomk", unbiased=True)
