"""Gaussian-k: top-k by a threshold from a fitted normal distribution (Shi et al. 2019, arXiv 1911.08772)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import hvdcompress
from experiments.training import numpy_digits
from hvdcompress.loopback import Loopback
from hvdcompress.method import Context, TensorSpec, Workspace
from hvdcompress.ops import numpy as reference
from hvdcompress.parts import candidates, select
from hvdcompress.testing import Trial, numbers
from tests.oracles.gaussiank import Oracle, authors_rule, sent_by_the_authors_rule
from tests.unit.methods.distributions import sent_of, shapes


def run_beside_oracle(world_size: int = 3, n: int = 300, density: float = 0.05, steps: int = 22) -> None:
    """Compare ``refine: paper`` with the authors' rule: results up to rounding, residuals exactly."""
    net = Loopback("gaussiank", world_size=world_size, density=density, refine="paper", min_elements=1)
    oracle = Oracle(world_size, n, density)
    kinds = ("normal", "heavy", "shifted", "sparse")
    for step in range(steps):
        gradients = [numbers((n,), rank, step, kind=kinds[step // 3 % 4]) for rank in range(world_size)]  # type: ignore
        total = oracle.step(gradients)
        out = net.allreduce(gradients, "w", op="sum")[0]
        np.testing.assert_allclose(out, total, rtol=1e-5, atol=1e-5 * np.abs(total).max())
        for rank in range(world_size):
            np.testing.assert_array_equal(net.residual("w", rank), oracle.memory[rank])


@pytest.mark.parametrize("world_size,n,density", [(1, 300, 0.05), (2, 90, 0.1), (3, 2, 0.5), (4, 127, 0.3)])
def test_paper_refinement_beside_the_authors_rule(world_size: int, n: int, density: float) -> None:
    run_beside_oracle(world_size, n, density)


def count_of(u: np.ndarray, density: float) -> int:
    """Return how many elements exceed the threshold of ``refine: paper``."""
    elements = candidates.Elements(u, None, None, reference)
    start = np.float32(select.gaussian_threshold(*reference.moments(u), density))
    t, _ = select.refine_paper(elements, start, select.gaussiank_limits(density, len(u)))
    return int(np.count_nonzero(np.abs(u) > t))


@pytest.mark.parametrize("density", [0.1, 0.01, 0.001])
@pytest.mark.parametrize("heavy", ["laplace", "student t", "lognormal with signs", "cubes"])
def test_the_mask_before_the_third_change_is_sent_of_heavy_tails(heavy: str, density: float) -> None:
    rng, n = np.random.default_rng(5), 50_000
    u = {
        "laplace": lambda: rng.laplace(size=n),
        "student t": lambda: rng.standard_t(1.5, n),
        "lognormal with signs": lambda: rng.lognormal(0, 3, n) * rng.choice([-1, 1], n),
        "cubes": lambda: rng.normal(size=n) ** 3,
    }[heavy]()
    u = u.astype(np.float32)
    assert count_of(u, density) == len(authors_rule(u, density))


def residuals_of_a_training(density: float, steps: int = 60) -> Iterator[np.ndarray]:
    """Yield gradient + residual of the first layer of a net that learns digits under ``refine: paper``."""
    x, y = numpy_digits.load()[:2]
    rng = np.random.default_rng(0)
    w = {"fc1.weight": rng.normal(0, 0.1, (64, 96)), "fc1.bias": np.zeros(96)}
    w |= {"fc2.weight": rng.normal(0, 0.1, (96, 10)), "fc2.bias": np.zeros(10)}
    w = {name: value.astype(np.float32) for name, value in w.items()}
    net = Loopback("gaussiank", world_size=1, density=density, refine="paper", min_elements=1)
    residual = np.zeros(w["fc1.weight"].shape, np.float32)
    for _ in range(steps):
        batch = rng.integers(0, len(y), 32)
        gradients = numpy_digits.loss_and_gradient(w, x[batch], y[batch])[1]
        yield (gradients["fc1.weight"] + residual).ravel()
        for name, update in net.allreduce_many([gradients])[0].items():
            w[name] = w[name] - np.float32(0.1) * update
        residual = net.residual("fc1.weight", 0)


def test_the_mask_before_the_third_change_is_sent_of_real_residuals() -> None:
    changed_in_vain = 0
    for u in residuals_of_a_training(density=0.01):
        count, k = len(authors_rule(u, 0.01)), int(len(u) * 0.01)
        assert count_of(u, 0.01) == count
        changed_in_vain += not 2 * k / 3 <= count <= 4 * k / 3
    assert changed_in_vain > 5, "hardly a step whose threshold changes a third time"


@pytest.mark.parametrize("density", [0.1, 0.01, 0.001])
@pytest.mark.parametrize("sigma,key", [(1.0, 0), (1e-6, 1), (1e6, 2)])
def test_first_threshold_is_within_ten_percent_on_normal_data(density: float, sigma: float, key: int) -> None:
    n = 1_000_000
    x = np.random.default_rng(key).normal(0, sigma, n).astype(np.float32)
    threshold = select.gaussian_threshold(*reference.moments(x), density)
    count = np.count_nonzero(np.abs(x) > np.float32(threshold))
    # three standard deviations of the count itself come on top, which matter at k = 1000
    assert abs(count - n * density) <= 0.1 * n * density
    assert np.count_nonzero(sent_of(x, density)) == count, "a good first threshold is not refined"


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1, 0.5])
@pytest.mark.parametrize("name", shapes())
def test_bisection_holds_the_count_on_any_distribution(name: str, density: float) -> None:
    u = shapes()[name].astype(np.float32)
    k = max(1, int(len(u) * density + 1e-9))
    out = sent_of(u, density)
    count = np.count_nonzero(out)
    assert 2 * k <= 3 * count and 3 * count <= 4 * k, f"{count} sent, k = {k}"
    # a threshold selects, not the capacity: no element left out is larger than one that is sent
    assert np.abs(u[out == 0]).max() <= np.abs(out[out != 0]).min()


@given(
    hnp.arrays(np.float32, st.integers(1, 60), elements=st.floats(-(2.0**100), 2.0**100, width=32)),
    st.sampled_from([0.02, 0.1, 0.3, 0.75, 1.0]),
)
def test_bisection_holds_the_count_whatever_the_numbers(u: np.ndarray, density: float) -> None:
    n = len(u)
    k = min(n, max(1, int(n * density + 1e-9)))
    out = sent_of(u, density)
    count, nonzero = np.count_nonzero(out), np.count_nonzero(u)
    assert 3 * count <= 4 * k
    assert 3 * count >= 2 * k or count == nonzero, f"{count} of {nonzero} non-zero sent, k = {k}"
    # the largest are sent: no element left out is larger than one that is sent
    if count and count < n:
        assert np.abs(u[out == 0]).max() <= np.abs(out[out != 0]).min()


@pytest.mark.parametrize("nonzero", [0, 1, 5, 66, 67, 100, 133, 134, 500])
def test_fewer_only_where_fewer_are_non_zero(nonzero: int) -> None:
    u = np.zeros(10_000, np.float32)
    u[np.linspace(0, 9_999, nonzero, dtype=int)] = numbers((nonzero,), 3) + np.float32(20)
    count = np.count_nonzero(sent_of(u, 0.01))  # k = 100, capacity 133
    assert 67 <= count <= 133 if nonzero >= 67 else count == nonzero


def test_ties_are_filled_up_from_the_lowest_index() -> None:
    out = sent_of(np.full(1000, 2.0, np.float32), 0.01)
    assert np.flatnonzero(out).tolist() == list(range(10))


def test_sent_and_residual_make_up_the_sum_exactly() -> None:
    net = Loopback("gaussiank", world_size=2, density=0.05)
    residuals = [np.zeros(3000, np.float32)] * 2
    for step in range(10):
        gradients = [numbers((3000,), rank, step, kind="heavy") for rank in range(2)]
        u = [r + g for r, g in zip(residuals, gradients, strict=True)]
        net.allreduce(gradients, "w")
        residuals = [net.residual("w", rank) for rank in range(2)]
        for before, after in zip(u, residuals, strict=True):
            assert ((after == before) | (after == 0)).all()  # each element is sent entirely or not at all


@pytest.mark.parametrize("density", [0.1, 0.01, 0.001])
def test_bound_on_bell_shaped_data(density: float) -> None:
    """‖u − Top_k(u)‖² ≤ (1 − k/n)²‖u‖², the paper's theorem, with k the number really sent."""
    n = 100_000
    for key, u in enumerate((np.random.default_rng(1).normal(size=n), np.random.default_rng(2).laplace(size=n))):
        u = u.astype(np.float32)
        out = sent_of(u, density).astype(np.float64)
        share = ((u - out) ** 2).sum() / (u.astype(np.float64) ** 2).sum()
        assert share <= (1 - np.count_nonzero(out) / n) ** 2, key


def test_constant_vector_meets_the_older_bound_exactly() -> None:
    """‖u − Top_k(u)‖² = (1 − k/n)‖u‖²: the worst case, beyond the tighter bound."""
    n = 1000
    u = np.full(n, 3.0, np.float32)
    out = sent_of(u, 0.1)
    k = np.count_nonzero(out)
    assert k == 100
    assert ((u - out) ** 2).sum() == (1 - k / n) * (u**2).sum() > (1 - k / n) ** 2 * (u**2).sum()


@pytest.mark.parametrize("refine", ["bisect", "paper"])
def test_a_single_element_is_sent(refine: str) -> None:
    """In the authors' code its standard deviation is NaN, and it is never sent."""
    net = Loopback("gaussiank", world_size=2, density=0.001, refine=refine, min_elements=1)
    total = sum(net.allreduce([np.float32([2]), np.float32([4])], "w")[0][0] for _ in range(3))
    assert total > 0
    if refine == "bisect":
        assert total == 9


def test_unequal_counts_and_zero_counts() -> None:
    """Ranks send different numbers of entries in payloads of one length; a rank may send none."""
    n = 2000
    gradients = [np.zeros(n, np.float32), numbers((n,), 1), numbers((n,), 2, kind="sparse")]
    gradients[2][50:] = 0
    net = Trial(hvdcompress.get("gaussiank", density=0.01, feedback="none"), 3)
    out = net.allreduce(gradients, "w", op="sum")[0]
    kept = [net.ledger.counters(rank)["kept"] for rank in range(3)]
    assert kept[0] == 0 and kept[1] >= 14 and kept[2] == np.count_nonzero(gradients[2])
    assert len(set(net.log[0].num_bytes)) == 1
    assert np.count_nonzero(out) >= kept[1]
    for rank, gradient in enumerate(gradients):
        assert np.count_nonzero(gradient) >= kept[rank]


def test_duplicates_of_different_ranks_sum() -> None:
    spike = np.zeros(100, np.float32)
    spike[17] = 1
    out = Loopback("gaussiank", world_size=3, density=0.01, min_elements=1).allreduce(
        [spike, spike * 2, spike * 4], op="sum"
    )
    assert out[0][17] == 7 and np.count_nonzero(out[0]) == 1


def test_overflow_of_the_paper_rule_returns_to_the_residual() -> None:
    """Laplace data: the paper's rule leaves far more than the capacity beyond its threshold."""
    u = np.random.default_rng(3).standard_t(1.5, 20_000).astype(np.float32)
    method = hvdcompress.get("gaussiank", density=0.001, refine="paper")
    k, capacity = 20, 26
    everything = sent_by_the_authors_rule(u, 0.001)
    net = Trial(method, 1)
    net.allreduce([u], "w")
    assert net.ledger.counters(0)["kept"] == len(everything) <= capacity
    shifted = (np.random.default_rng(4).normal(size=20_000) + 3).astype(np.float32)
    out = sent_of(shifted, 0.001, refine="paper")
    assert np.count_nonzero(out) <= capacity
    assert np.count_nonzero(sent_of(shifted, 0.001)) >= 2 * k / 3


def test_scope_global_selects_over_the_joined_buffer() -> None:
    """As the authors do: k of all elements together; residuals are kept per parameter."""
    names, shapes_ = ("a", "b", "c"), ((30,), (4, 20), (500,))
    factor = {"a": 100.0, "b": 1.0, "c": 0.01}
    net = Loopback("gaussiank", world_size=2, density=0.05, scope="global", min_elements=1)
    gradients = [
        {
            name: numbers(shape, i, rank) * np.float32(factor[name])
            for i, (name, shape) in enumerate(zip(names, shapes_, strict=True))
        }
        for rank in range(2)
    ]
    outs = net.allreduce_many(gradients, op="sum")
    joined = Loopback("gaussiank", world_size=2, density=0.05, min_elements=1)
    flat = [np.concatenate([one[name].ravel() for name in names]) for one in gradients]
    expected = joined.allreduce(flat, "flat", op="sum")[0]
    np.testing.assert_array_equal(np.concatenate([outs[0][name].ravel() for name in names]), expected)
    assert np.count_nonzero(outs[0]["a"]) > 20 and not outs[0]["c"].any()
    for name, shape in zip(names, shapes_, strict=True):
        assert net.residual(name, 0).shape == shape
        sent = gradients[0][name] - net.residual(name, 0)
        assert ((sent == 0) | (sent == gradients[0][name])).all()
    assert net.ledger.collectives(0) == 1


def test_scope_tensor_selects_in_each() -> None:
    net = Loopback("gaussiank", world_size=1, density=0.1, min_elements=1)
    out = net.allreduce_many([{"a": numbers((50,), 1) * np.float32(100), "c": numbers((50,), 2)}])[0]
    assert np.count_nonzero(out["a"]) and np.count_nonzero(out["c"])


def test_moments_are_taken_in_the_pass_that_adds_the_residual() -> None:
    ctx = Context(0, 1, 0, TensorSpec("w", (1001,)))
    assert hvdcompress.get("gaussiank").scan(0, {}, ctx, Workspace(reference), numbers((1001,), 1)).moments


def test_bytes_have_one_length_whatever_the_data() -> None:
    """⌊4k/3⌋ slots: constant lengths keep Horovod's response cache valid."""
    lengths = set()
    for kind in ("normal", "zero", "heavy", "constant", "sparse"):
        net = Trial(hvdcompress.get("gaussiank", density=0.01), 2)
        net.allreduce([numbers((5000,), rank, kind=kind) for rank in range(2)], "w")
        lengths |= set(net.log[0].num_bytes)
    k = 66  # ⌊4·50/3⌋; l = ⌊log2(5000/66)⌋ = 6
    up4 = lambda num_bytes: -(-num_bytes // 4) * 4  # noqa: E731
    assert lengths == {24 + up4(-(-k * 6 // 8)) + up4(-(-(k + (5000 >> 6) + 1) // 8)) + 4 * k}


def test_many_workers_with_few_elements() -> None:
    net = Loopback("gaussiank", world_size=128, density=0.25, min_elements=1)
    gradients = [numbers((8,), rank) for rank in range(128)]
    outs = net.allreduce(gradients, "w", op="sum")
    kept = np.sum([net.residual("w", rank) for rank in range(128)], axis=0, dtype=np.float64)
    assert len({out.tobytes() for out in outs}) == 1
    np.testing.assert_allclose(outs[0] + kept, np.sum(gradients, axis=0, dtype=np.float64), atol=1e-3)


def test_density_warm_up_by_epoch() -> None:
    """The reference code's schedule, [0.015625, 0.004, 0.001], as a plan writes it."""
    plan = {
        "method": "gaussiank", "steps_per_epoch": 2, "min_elements": 1,
        "schedule": {"density": {"epochs": {0: 0.015625, 1: 0.004, 2: 0.001}}},
    }  # fmt: skip
    net = Loopback(plan, world_size=1)
    kept = []
    for step in range(6):
        before = net.ledger.counters(0).get("kept", 0)
        net.allreduce([np.random.default_rng(step).normal(size=20_000).astype(np.float32)], "w")
        kept.append(net.ledger.counters(0)["kept"] - before)
    for count, k in zip(kept, (312, 312, 80, 80, 20, 20), strict=True):
        assert 2 * k / 3 <= count <= 4 * k / 3
