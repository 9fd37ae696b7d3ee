"""RedSync: top-k by a threshold between mean and maximum (Fang et al. 2019, arXiv 1808.04357)."""

from __future__ import annotations

import numpy as np
import pytest

import hvdcompress
from hvdcompress.loopback import Loopback
from hvdcompress.method import Context, TensorSpec, Workspace
from hvdcompress.ops.numpy import ops as reference
from hvdcompress.testing import Trial, numbers
from tests.oracles.redsync import FRESH, Oracle
from tests.unit.methods.comparing import assert_matches_oracle
from tests.unit.methods.distributions import distributions, sent_of


@pytest.mark.parametrize("tolerance", [0.2, 0.001])
@pytest.mark.parametrize("world_size,n,density,interval", [(1, 300, 0.05, 1), (2, 90, 0.1, 5), (3, 127, 0.3, 3)])
def test_published_search_matches_the_oracle(
    world_size: int, n: int, density: float, interval: int, tolerance: float
) -> None:
    options = {"density": density, "tolerance": tolerance, "interval": interval, "select": "paper"}
    net = Loopback("redsync", world_size=world_size, min_elements=1, **options)
    kinds = [kind for kind in ("normal", "heavy", "shifted", "sparse") for _ in range(4)]
    oracle = Oracle(world_size, n, density, tolerance, interval)
    assert_matches_oracle(net, oracle, (n,), steps=16, kinds=kinds, tolerance=1e-5, exact_residuals=True)


@pytest.mark.parametrize("density", [0.001, 0.1, 0.9])
@pytest.mark.parametrize("name", distributions())
def test_trimmed_sends_what_topk_sends(name: str, density: float) -> None:
    u = distributions()[name].astype(np.float32)
    np.testing.assert_array_equal(sent_of(u, density, "redsync", select="trimmed"), sent_of_topk(u, density))


def sent_of_topk(u: np.ndarray, density: float) -> np.ndarray:
    return Loopback("topk", world_size=1, density=density, min_elements=1).allreduce([u], "w")[0]


class CountingOps:
    """The array ops, which record the sizes of the vectors whose mean was computed: each search begins with it."""

    def __init__(self) -> None:
        self.searches: list[int] = []

    def __getattr__(self, name: str) -> object:
        return getattr(reference, name)

    def bucket_norms(self, x: np.ndarray, bucket: int, norm: str) -> np.ndarray:
        self.searches.append(len(x))
        return reference.bucket_norms(x, bucket, norm)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "interval,scales,searches",
    [(1, [1] * 6, 6), (3, [1] * 6, 2), (5, [1] * 6, 2), (100, [1] * 6, 1), (100, [1, 1, 100, 100, 0.01, 0.01], 3)],
)
def test_threshold_is_reused_while_it_fits(interval: int, scales: list[float], searches: int) -> None:
    """A search follows the interval, or a threshold that leaves fewer than k or more than 2k elements."""
    ops = CountingOps()
    net = Trial(hvdcompress.get_method("redsync", density=0.05, interval=interval, feedback="none"), 1, ops=ops)
    for step, scale in enumerate(scales):
        u = np.random.default_rng(step).normal(size=20_000).astype(np.float32) * np.float32(scale)
        assert 1000 <= np.count_nonzero(net.allreduce([u], "w")[0]) <= 2000
    assert len(ops.searches) == searches


def test_published_search_reuses_its_threshold_even_if_it_does_not_fit() -> None:
    net = Trial(hvdcompress.get_method("redsync", select="paper", density=0.1, interval=3, feedback="none"), 1)
    u = np.random.default_rng(3).normal(size=5000).astype(np.float32)
    sent = [np.count_nonzero(net.allreduce([u * np.float32(f)], "w")[0]) for f in (1, 0.01, 100, 0.01)]
    assert 500 < sent[0] < 1000 and sent[1] == 0
    assert sent[2] == 1000, "the first 2k of them"
    assert 500 < sent[3] < 1000, "the interval is over"


def test_single_spike_defeats_the_published_search() -> None:
    """All but the spike are within a thousandth of the way from mean to maximum."""
    u = np.random.default_rng(6).normal(size=10_000).astype(np.float32)
    u[77] = 1e5
    assert np.flatnonzero(sent_of(u, 0.01, "redsync", select="paper")).tolist() == [77]
    assert 100 <= np.count_nonzero(sent_of(u, 0.01, "redsync")) <= 200


@pytest.mark.parametrize("select", ["search", "paper", "trimmed"])
def test_equal_magnitudes_and_a_single_element_are_sent(select: str) -> None:
    """Their threshold by the published rule is their magnitude, which none of them exceeds."""
    assert np.count_nonzero(sent_of(np.full(1000, -2.0), 0.01, "redsync", select=select)) in (10, 20)
    assert sent_of(np.float32([3]), 0.001, "redsync", select=select).tolist() == [3]


def test_candidates_change_nothing() -> None:
    """Candidates recorded in the pass that adds the residual are only a short cut."""
    method = hvdcompress.get_method("redsync", density=0.02, interval=2)
    net = Trial(method, 1)
    memory, known = np.zeros(4000, np.float32), FRESH
    for step in range(9):
        gradient = numbers((4000,), 0, step, kind="heavy")
        ctx = Context(0, 1, step, TensorSpec("w", (4000,)))
        reused = known if step % 2 else FRESH
        chosen, known = method.choose(gradient + memory, reused, ctx, Workspace(reference))  # type: ignore[attr-defined]
        out = net.allreduce([gradient], "w")[0]
        assert np.flatnonzero(out).tolist() == chosen.index.tolist()
        memory = net.residual("w", 0).ravel()
