"""RedSync: top-k by a threshold between mean and maximum (Fang et al. 2019, arXiv 1808.04357)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

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
from hvdcompress.testing import Trial, numbers
from tests.oracles.redsync import FRESH, Oracle, num_kept
from tests.unit.methods.distributions import sent_of as sent_by
from tests.unit.methods.distributions import shapes

sent_of = partial(sent_by, method="redsync")


def run_beside_oracle(
    world_size: int = 2,
    n: int = 300,
    density: float = 0.05,
    tolerance: float = 0.001,
    interval: int = 3,
    steps: int = 16,
) -> None:
    """Compare ``select: paper`` with the published search: results up to rounding, residuals exactly."""
    options = {"density": density, "tolerance": tolerance, "interval": interval, "select": "paper"}
    net = Loopback("redsync", world_size=world_size, min_elements=1, **options)
    oracles = [Oracle(n, density, tolerance, interval) for _ in range(world_size)]
    for step in range(steps):
        kind = ("normal", "heavy", "shifted", "sparse")[step // 4 % 4]
        gradients = [numbers((n,), rank, step, kind=kind) for rank in range(world_size)]  # type: ignore[arg-type]
        total = np.sum([one.step(g) for one, g in zip(oracles, gradients, strict=True)], axis=0, dtype=np.float64)
        out = net.allreduce(gradients, "w", op="sum")[0]
        np.testing.assert_allclose(out, total, rtol=1e-5, atol=1e-5 * np.abs(total).max())
        for rank in range(world_size):
            np.testing.assert_array_equal(net.residual("w", rank), oracles[rank].memory)


@pytest.mark.parametrize("tolerance", [0.2, 0.001])
@pytest.mark.parametrize("world_size,n,density,interval", [(1, 300, 0.05, 1), (2, 90, 0.1, 5), (3, 127, 0.3, 3)])
def test_the_published_search_beside_the_published_rule(
    world_size: int, n: int, density: float, interval: int, tolerance: float
) -> None:
    run_beside_oracle(world_size, n, density, tolerance, interval)


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("name", shapes())
def test_k_to_2k_are_sent_of_any_distribution(name: str, density: float) -> None:
    u = shapes()[name].astype(np.float32)
    k, out = num_kept(density, len(u)), sent_of(u, density)
    assert k <= np.count_nonzero(out) <= 2 * k
    left = np.abs(u[out == 0])
    assert not left.size or left.max() <= np.abs(out[out != 0]).min()


@given(
    hnp.arrays(np.float32, st.integers(1, 60), elements=st.floats(-(2.0**100), 2.0**100, width=32)),
    st.sampled_from([0.02, 0.1, 0.3, 0.75, 1.0]),
)
def test_k_to_2k_are_sent_whatever_the_numbers(u: np.ndarray, density: float) -> None:
    k, out = num_kept(density, len(u)), sent_of(u, density)
    count, nonzero = np.count_nonzero(out), np.count_nonzero(u)
    assert k <= count <= 2 * k or count == nonzero < k
    if count and count < len(u):
        assert np.abs(u[out == 0]).max() <= np.abs(out[out != 0]).min()


@pytest.mark.parametrize("nonzero", [0, 1, 99, 100, 150, 200, 201, 5000])
def test_fewer_only_where_fewer_are_non_zero(nonzero: int) -> None:
    u = np.zeros(10_000, np.float32)
    u[np.linspace(0, 9_999, nonzero, dtype=int)] = numbers((nonzero,), 3) + np.float32(20)
    count = np.count_nonzero(sent_of(u, 0.01))  # k = 100
    assert 100 <= count <= 200 if nonzero >= 100 else count == nonzero


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("name", shapes())
def test_trimmed_sends_what_topk_sends(name: str, density: float) -> None:
    u = shapes()[name].astype(np.float32)
    other = Loopback("topk", world_size=1, density=density, min_elements=1)
    np.testing.assert_array_equal(sent_of(u, density, select="trimmed"), other.allreduce([u], "w")[0])


def test_trimmed_is_topk_in_every_step() -> None:
    nets = [
        Loopback("redsync", world_size=2, density=0.05, select="trimmed"),
        Loopback("topk", world_size=2, density=0.05),
    ]
    for step in range(5):
        gradients = [numbers((3000,), rank, step, kind="heavy") for rank in range(2)]
        one, two = (net.allreduce(gradients, "w")[0] for net in nets)
        np.testing.assert_array_equal(one, two)
    assert nets[0].ledger.bytes_sent(0) == nets[1].ledger.bytes_sent(0)


class Counting:
    """The array ops, with the sizes of the vectors whose mean magnitude was asked for: a search begins with it."""

    def __init__(self) -> None:
        self.searches: list[int] = []

    def __getattr__(self, name: str) -> object:
        return getattr(reference, name)

    def bucket_norms(self, x: np.ndarray, bucket: int, norm: str) -> np.ndarray:
        self.searches.append(len(x))
        return reference.bucket_norms(x, bucket, norm)  # type: ignore[arg-type]


@pytest.mark.parametrize("interval,searches", [(1, 12), (3, 4), (5, 3), (100, 1)])
def test_a_threshold_is_used_again(interval: int, searches: int) -> None:
    """On gradients of one distribution without feedback, it leaves k to 2k elements until the interval is over."""
    ops = Counting()
    net = Trial(hvdcompress.get("redsync", density=0.05, interval=interval, feedback="none"), 1, ops=ops)
    for step in range(12):
        net.allreduce([np.random.default_rng(step).normal(size=20_000).astype(np.float32)], "w")
    assert len(ops.searches) == searches


def test_a_threshold_that_no_longer_fits_is_searched_anew() -> None:
    ops = Counting()
    net = Trial(hvdcompress.get("redsync", density=0.05, interval=100, feedback="none"), 1, ops=ops)
    for factor in (1, 1, 100, 100, 0.01, 0.01):
        u = np.random.default_rng(3).normal(size=5000).astype(np.float32) * np.float32(factor)
        count = np.count_nonzero(net.allreduce([u], "w")[0])
        assert 250 <= count <= 500
    assert len(ops.searches) == 3


def test_the_published_search_uses_its_threshold_whatever_it_leaves() -> None:
    net = Trial(hvdcompress.get("redsync", select="paper", density=0.1, interval=3, feedback="none"), 1)
    u = np.random.default_rng(3).normal(size=5000).astype(np.float32)
    sent = [np.count_nonzero(net.allreduce([u * np.float32(f)], "w")[0]) for f in (1, 0.01, 100, 0.01)]
    assert 500 < sent[0] < 1000 and sent[1] == 0
    assert sent[2] == 1000, "the first 2k of them"
    assert 500 < sent[3] < 1000, "the interval is over"


def test_a_single_spike_defeats_the_published_search() -> None:
    """All but the spike are within a thousandth of the way from mean to maximum."""
    u = np.random.default_rng(6).normal(size=10_000).astype(np.float32)
    u[77] = 1e5
    assert np.flatnonzero(sent_of(u, 0.01, select="paper")).tolist() == [77]
    assert 100 <= np.count_nonzero(sent_of(u, 0.01)) <= 200


@pytest.mark.parametrize("select", ["search", "paper", "trimmed"])
def test_equal_magnitudes_and_a_single_element_are_sent(select: str) -> None:
    """Their threshold by the published rule is their magnitude, which none of them exceeds."""
    assert np.count_nonzero(sent_of(np.full(1000, -2.0), 0.01, select=select)) in (10, 20)
    assert sent_of(np.float32([3]), 0.001, select=select).tolist() == [3]


@pytest.mark.parametrize("select,most", [("search", 100), ("paper", 100), ("trimmed", 50)])
def test_bytes_have_one_length_whatever_the_data(select: str, most: int) -> None:
    lengths = set()
    for kind in ("normal", "zero", "heavy", "constant", "sparse"):
        net = Trial(hvdcompress.get("redsync", density=0.01, select=select), 2)
        net.allreduce([numbers((5000,), rank, kind=kind) for rank in range(2)], "w")  # type: ignore[arg-type]
        lengths |= set(net.log[0].num_bytes)
    low = {100: 5, 50: 6}[most]  # ⌊log2(5000/most)⌋
    up4 = lambda num_bytes: -(-num_bytes // 4) * 4  # noqa: E731
    assert lengths == {24 + up4(-(-most * low // 8)) + up4(-(-(most + (5000 >> low) + 1) // 8)) + 4 * most}


def test_candidates_change_nothing() -> None:
    """What is noted on the way to the sum is a short cut only."""
    method = hvdcompress.get("redsync", density=0.02, interval=2)
    net = Trial(method, 1)
    memory, known = np.zeros(4000, np.float32), FRESH
    for step in range(9):
        gradient = numbers((4000,), 0, step, kind="heavy")
        u = gradient + memory
        ctx = Context(0, 1, step, TensorSpec("w", (4000,)))
        chosen, known = method.choose(u, known if step % 2 else FRESH, ctx, Workspace(reference))  # type: ignore[attr-defined]
        out = net.allreduce([gradient], "w")[0]
        assert np.flatnonzero(out).tolist() == chosen.index.tolist()
        memory = net.residual("w", 0).ravel()


# -- counts in a training: what the method's page says ---------------------------------------------


def counts_of_a_training(density: float, steps: int = 200, **options: object) -> Iterator[float]:
    """Yield, for the first layer of a net that learns digits, the elements sent in units of k in each step."""
    x, y = numpy_digits.load()[:2]
    rng = np.random.default_rng(0)
    w = {"fc1.weight": rng.normal(0, 0.1, (64, 96)), "fc1.bias": np.zeros(96)}
    w |= {"fc2.weight": rng.normal(0, 0.1, (96, 10)), "fc2.bias": np.zeros(10)}
    w = {name: value.astype(np.float32) for name, value in w.items()}
    net = Loopback("redsync", world_size=1, density=density, min_elements=1, **options)
    k, before = num_kept(density, 64 * 96), np.zeros((64, 96), np.float32)
    for _ in range(steps):
        batch = rng.integers(0, len(y), 32)
        gradients = numpy_digits.loss_and_gradient(w, x[batch], y[batch])[1]
        u = gradients["fc1.weight"] + before
        for name, update in net.allreduce_many([gradients])[0].items():
            w[name] = w[name] - np.float32(0.1) * update
        before = net.residual("fc1.weight", 0)
        yield np.count_nonzero(u != before) / k


@pytest.mark.parametrize("options", [{}, {"interval": 1}])
def test_k_to_2k_are_sent_in_every_step_of_a_training(options: dict[str, int]) -> None:
    counts = np.array(list(counts_of_a_training(0.01, **options)))
    assert counts.min() >= 1 and counts.max() <= 2 and 1.3 < counts.mean() < 1.6


@pytest.mark.parametrize("tolerance,within,below", [(0.001, 0.545, 0.21), (0.2, 0.32, 0.365)])
def test_the_published_search_is_led_away_from_k(tolerance: float, within: float, below: float) -> None:
    """The shares of the steps of a training that the method's documentation has, with a search in every step."""
    counts = np.array(list(counts_of_a_training(0.01, select="paper", tolerance=tolerance, interval=1)))
    assert np.mean((counts >= 1) & (counts <= 2)) == pytest.approx(within, abs=0.05)
    assert np.mean(counts < 0.5) == pytest.approx(below, abs=0.05)
