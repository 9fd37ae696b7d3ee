"""randomk: the same k random positions on all ranks; values are summed, and no index is sent (Stich et al. 2018)."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hvdcompress
from hvdcompress.loopback import Loopback
from hvdcompress.method import Context, TensorSpec
from hvdcompress.parts import seed
from hvdcompress.testing import Trial, numbers


def places(n: int, k: int, step: int, key: int = 0, name: str = "w") -> np.ndarray:
    return seed.distinct_indices(seed.shared_key(Context(0, 1, step, TensorSpec(name, (n,)), key)), k, n)


def run_beside_oracle(world_size: int = 3, n: int = 60, density: float = 0.1, steps: int = 25) -> None:
    """rand_k with memory, dense. Its positions come from a network with the same seed that reduces ones."""
    net = Loopback("randomk", world_size=world_size, density=density, min_elements=1, seed=11)
    probe = Loopback("randomk", world_size=1, density=density, min_elements=1, seed=11, feedback="none")
    memory = [np.zeros(n, np.float32) for _ in range(world_size)]
    for step in range(steps):
        mask = probe.allreduce([np.ones(n, np.float32)], "w")[0] != 0
        assert mask.sum() == max(1, int(n * density + 1e-9))
        gradients = [numbers((n,), rank, step) for rank in range(world_size)]
        total = np.zeros(n)
        for rank in range(world_size):
            u = memory[rank] + gradients[rank]
            total += np.where(mask, u, 0)
            memory[rank] = np.where(mask, np.float32(0), u)
        np.testing.assert_allclose(net.allreduce(gradients, "w", op="sum")[0], total, rtol=1e-5, atol=1e-5)
        for rank in range(world_size):
            np.testing.assert_array_equal(net.residual("w", rank), memory[rank])


@pytest.mark.parametrize("world_size,n,density", [(1, 60, 0.1), (2, 7, 0.5), (4, 101, 0.03), (5, 1, 1.0)])
def test_beside_an_independent_oracle(world_size: int, n: int, density: float) -> None:
    run_beside_oracle(world_size, n, density)


@given(st.integers(1, 5000), st.floats(0, 1), st.integers(0, 2**40), st.integers(0, 10**6))
def test_places_are_distinct_ascending_and_inside(n: int, share: float, key: int, step: int) -> None:
    k = max(1, int(n * share))
    index = places(n, k, step, key)
    assert len(index) == k and index[0] >= 0 and index[-1] < n
    assert (np.diff(index) > 0).all()


def test_all_places_when_all_are_kept() -> None:
    assert places(1000, 1000, 3).tolist() == list(range(1000))


@pytest.mark.parametrize("n,k", [(2, 1), (3, 1), (10, 3), (64, 5), (100, 10), (1000, 7)])
def test_places_are_uniform_over_many_steps(n: int, k: int) -> None:
    """Chi-square with n − 1 degrees of freedom, at six standard deviations."""
    steps = max(1200, 20 * n // k)
    count = np.bincount(np.concatenate([places(n, k, step) for step in range(steps)]), minlength=n)
    expected = steps * k / n
    # drawing without replacement makes each count's variance k/n·(1 − k/n) a step, not k/n
    chi_square = ((count - expected) ** 2).sum() / (expected * (1 - k / n)) * (n - 1) / n
    assert abs(chi_square - (n - 1)) < 6 * np.sqrt(2 * (n - 1)) + 6, chi_square


def test_pairs_of_places_are_independent() -> None:
    """Neighbours are drawn together as often as any other pair."""
    n, k, steps = 50, 5, 3000
    near = sum(int((np.diff(places(n, k, step)) == 1).sum()) for step in range(steps))
    expected = steps * (n - 1) * (k * (k - 1)) / (n * (n - 1))
    assert abs(near - expected) < 6 * np.sqrt(expected)


def test_indices_above_two_to_the_24_are_reached_and_told_apart() -> None:
    """Sampling through float32 would give only even indices beyond 2^24."""
    n = 2**24 + 2**20 + 3
    index = places(n, 200_000, 1)
    high = index[index >= 2**24]
    assert abs(len(high) / 200_000 - (n - 2**24) / n) < 0.005
    assert 0.45 < (high % 2).mean() < 0.55


def test_places_change_with_step_seed_and_name() -> None:
    base = places(1000, 10, 0)
    assert base.tolist() == places(1000, 10, 0).tolist()
    for other in (places(1000, 10, 1), places(1000, 10, 0, key=1), places(1000, 10, 0, name="v")):
        assert base.tolist() != other.tolist()


def test_global_generators_are_untouched() -> None:
    before, python = np.random.get_state()[1].copy(), random.getstate()
    Loopback("randomk", world_size=3, density=0.1).allreduce([numbers((2000,), rank) for rank in range(3)])
    assert (np.random.get_state()[1] == before).all() and random.getstate() == python


def test_all_ranks_draw_the_same_places_and_send_no_index() -> None:
    net = Trial(hvdcompress.get("randomk", density=0.01), 4)
    net.allreduce([np.full(1000, rank + 1, np.float32) for rank in range(4)], "w")
    assert [(c.collective, c.num_bytes) for c in net.log] == [("AllReduce", (40,) * 4)]
    assert set(net.allreduce([np.ones(1000, np.float32)] * 4, "v")[0].tolist()) == {0, 1}


@pytest.mark.parametrize("values,sent", [("fp32", 400), ("fp16", 200), ("bf16", 2 * 102 + 2 * 34)])
def test_bytes_by_the_formula(values: str, sent: int) -> None:
    net = Loopback("randomk", world_size=3, density=0.1, values=values, min_elements=1)
    net.allreduce([numbers((1000,), rank) for rank in range(3)])
    assert net.ledger.bytes_sent(2) == sent


def test_unbiased_variant_scales_and_averages_to_the_gradient() -> None:
    n, steps = 30, 1500
    g = numbers((n,), 5)
    net = Loopback("randomk", world_size=1, density=0.2, feedback="none", unbiased=True, min_elements=1)
    outs = np.array([net.allreduce([g], "w")[0] for _ in range(steps)], np.float64)
    assert np.allclose(outs[outs != 0], (np.broadcast_to(g, outs.shape) * 5)[outs != 0], rtol=1e-6)
    # variance (n/k − 1)·g² a place
    assert (np.abs(outs.mean(axis=0) - g) <= 6 * np.abs(g) * np.sqrt(4 / steps) + 1e-6).all()
    np.testing.assert_allclose(((outs - g) ** 2).sum(axis=1).mean(), 4 * (g**2).sum(), rtol=0.1)


def test_unbiased_needs_feedback_none() -> None:
    with pytest.raises(ValueError, match='unbiased.*feedback: "none"'):
        hvdcompress.get("randomk", unbiased=True)


def test_with_feedback_nothing_is_scaled() -> None:
    out = Loopback("randomk", world_size=2, density=0.5, min_elements=1).allreduce([np.ones(10, np.float32)] * 2)[0]
    assert set(out.tolist()) == {0, 1}
