"""TernGrad: −s, 0 or +s at random, summed as packed fields (Wen et al. 2017, arXiv 1705.07878)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import hvdcompress
from hvdcompress.loopback import Loopback
from hvdcompress.testing import Trial, numbers
from tests.unit.methods.quantizers import assert_errors_average_out, assert_nothing_is_lost

ROUTES = ("reduce", "gather", "scatter")


def clip_of_the_paper(g: np.ndarray, factor: float = 2.5) -> np.ndarray:
    """±2.5σ, for a gradient whose mean is near 0."""
    limit = factor * g.astype(np.float64).std(ddof=1)
    return np.clip(g.astype(np.float64), -limit, limit)


def ternaries(net: Trial, n: int, world_size: int) -> list[np.ndarray]:
    """Return every rank's ternaries [n], unpacked from its all-reduce payload with Python's integers."""
    width = math.ceil(math.log2(2 * world_size + 1))
    per = 32 // width
    words = next(c for c in reversed(net.log) if c.op == "sum").sent
    found = []
    for sent in words:
        fields = []
        for word in np.frombuffer(sent, "<i4").tolist():
            for _ in range(per):  # the lowest field is its residue nearest to 0
                field = (word + world_size) % 2**width - world_size
                fields.append(field)
                word = (word - field) >> width
            assert word == 0
        found.append(np.array(fields[:n]))
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 8, 40])
def test_fields_are_ternaries_and_the_scaler_is_the_largest(world_size: int) -> None:
    n = 101
    net = Trial(hvdcompress.get("terngrad"), world_size)
    gradients = [(rank + 1) * numbers((n,), rank) for rank in range(world_size)]
    out = net.allreduce(gradients, "w", op="sum")[0]
    scalers = [np.frombuffer(sent, "<f4")[0] for sent in net.log[0].sent]
    clipped = [clip_of_the_paper(g) for g in gradients]
    np.testing.assert_allclose(scalers, [np.abs(c).max() for c in clipped], rtol=1e-6)
    drawn = ternaries(net, n, world_size)
    for t, g in zip(drawn, gradients, strict=True):
        assert set(t.tolist()) <= {-1, 0, 1} and (t * g >= 0).all()
    np.testing.assert_array_equal(out, np.sum(drawn, axis=0).astype(np.float32) * max(scalers))


@pytest.mark.parametrize("world_size,width", [(1, 2), (2, 3), (3, 3), (4, 4), (7, 4), (8, 5), (16, 6), (64, 8)])
def test_bytes_by_the_formula(world_size: int, width: int) -> None:
    """⌈log2(2p + 1)⌉ bits per field, ⌊32/width⌋ fields per int32, and one scaler."""
    assert width == math.ceil(math.log2(2 * world_size + 1))
    for n in (1, 16, 1000):
        net = Trial(hvdcompress.get("terngrad"), world_size)
        net.allreduce([numbers((n,), rank) for rank in range(world_size)], "w")
        assert net.ledger.bytes_sent(0) == 4 + 4 * math.ceil(n / (32 // width))
        assert [(c.collective, c.op, c.dtypes[0], c.lengths[0]) for c in net.log] == [
            ("AllReduce", "max", "float32", 1),
            ("AllReduce", "sum", "int32", math.ceil(n / (32 // width))),
        ]


def test_bytes_of_the_other_routes() -> None:
    for world_size in (1, 3):
        for n in (1, 7, 1000):
            net = Trial(hvdcompress.get("terngrad", route="gather"), world_size)
            net.allreduce([numbers((n,), rank) for rank in range(world_size)], "w")
            assert net.ledger.bytes_sent(0) == 24 + 4 + math.ceil(n / 4)
            net = Trial(hvdcompress.get("terngrad", route="scatter"), world_size)
            net.allreduce([numbers((n,), rank) for rank in range(world_size)], "w")
            assert net.ledger.bytes_sent(0) == (world_size + 1) * (4 + math.ceil(math.ceil(n / world_size) / 4))


def run_mean(clip: float = 0.0, route: str = "reduce", world_size: int = 4, steps: int = 600) -> None:
    """The mean over steps approaches the mean of the (clipped) gradients as 1/√steps."""
    net = Loopback("terngrad", world_size=world_size, clip_factor=clip, route=route, min_elements=1)
    gradients = [numbers((60,), rank) for rank in range(world_size)]
    outs = np.array([net.allreduce(gradients, "w")[0] for _ in range(steps)], np.float64)
    expected = np.mean([clip_of_the_paper(g, clip) if clip else g for g in gradients], axis=0, dtype=np.float64)
    error = outs.mean(0) - expected
    assert (error**2).sum() < 1.6 * outs.var(0).sum() / steps


@pytest.mark.parametrize("route", ROUTES)
def test_unbiased_without_clipping(route: str) -> None:
    run_mean(0.0, route)


@pytest.mark.parametrize("route", ["reduce", "gather"])
def test_with_clipping_the_mean_is_the_clipped_gradient(route: str) -> None:
    run_mean(0.8, route)


def test_unbiased_is_declared_without_clipping_only() -> None:
    assert hvdcompress.get("terngrad", clip_factor=0).unbiased
    assert not hvdcompress.get("terngrad").unbiased
    assert not hvdcompress.get("terngrad", clip_factor=0, feedback="plain").unbiased


def test_variance_is_that_of_ternaries() -> None:
    """E(s·b)² − g² = s·|g| − g² for each element, as P(b = 1) = |g|/s."""
    g, net = numbers((300,), 3), Loopback("terngrad", world_size=1, clip_factor=0, min_elements=1)
    outs = np.array([net.allreduce([g], "w")[0] for _ in range(800)], np.float64)
    expected = (np.abs(g).max() * np.abs(g) - g**2).sum()
    np.testing.assert_allclose(np.square(outs - g).mean(0).sum(), expected, rtol=0.05)


def test_clipping_lowers_the_scaler() -> None:
    g = numbers((1000,), 4)
    g[17] = 100.0
    clipped, whole = [
        Loopback("terngrad", world_size=1, clip_factor=c, min_elements=1).allreduce([g], "w")[0] for c in (2.5, 0)
    ]
    assert np.abs(whole).max() == 100.0
    np.testing.assert_allclose(np.abs(clipped).max(), 2.5 * g.astype(np.float64).std(ddof=1), rtol=1e-6)
    assert clipped[17] == np.abs(clipped).max()


def run_survives(route: str, values: list[float]) -> None:
    for value in values:
        for n in (1, 2, 100):
            g = np.full(n, value, np.float32)
            for world_size in (1, 3):
                net = Loopback("terngrad", world_size=world_size, route=route, min_elements=1)
                np.testing.assert_allclose(net.allreduce([g] * world_size, "w")[0], g, rtol=1e-6)


@pytest.mark.parametrize("route", ROUTES)
def test_constant_and_one_element_tensors_survive(route: str) -> None:
    run_survives(route, [0.1, -3.0, 0.0, 1e37, -1e-40])


@pytest.mark.parametrize("route", ROUTES)
def test_a_nearly_constant_tensor_survives(route: str) -> None:
    """Its σ is far below its values: clipping to 2.5σ would remove nearly all of it."""
    g = (1 + 1e-4 * numbers((1000,), 5)).astype(np.float32)
    out = Loopback("terngrad", min_elements=1, world_size=2, route=route).allreduce([g, g], "w")[0]
    np.testing.assert_allclose(out, g, rtol=1e-3)


def test_errors_of_ranks_average_out() -> None:
    assert_errors_average_out("terngrad", clip_factor=0)


@pytest.mark.parametrize("world_size", [2, 5, 100, 1024])
def test_nothing_carries_when_all_agree(world_size: int) -> None:
    """All ternaries are 1, or all −1: the sums are ±p, the most a field must hold."""
    g = np.where(np.arange(33) % 2, np.float32(-2), np.float32(2))
    net = Loopback("terngrad", world_size=world_size, min_elements=1)
    np.testing.assert_array_equal(net.allreduce([g] * world_size, "w")[0], g)


@pytest.mark.parametrize("route", ROUTES)
def test_nothing_is_lost_with_feedback(route: str) -> None:
    assert_nothing_is_lost("terngrad", 1e-4, route=route, feedback="plain")


@pytest.mark.parametrize(
    "options,words", [({"clip_factor": -1}, "greater than or equal to 0"), ({"route": "x"}, "'reduce'")]
)
def test_wrong_hyperparameters_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        hvdcompress.get("terngrad", **options)
