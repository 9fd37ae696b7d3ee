"""TernGrad: −s, 0 or +s at random, summed as packed fields (Wen et al. 2017, arXiv 1705.07878)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import hvdcompress
from hvdcompress.loopback import Loopback
from hvdcompress.testing import Trial, numbers
from tests.unit.methods.comparing import assert_errors_average_out, assert_unbiased

ROUTES = ("reduce", "gather", "scatter")


def clip_of_the_paper(g: np.ndarray, factor: float = 2.5) -> np.ndarray:
    """±2.5σ, for a gradient whose mean is near 0."""
    limit = factor * g.astype(np.float64).std(ddof=1)
    return np.clip(g.astype(np.float64), -limit, limit)


def ternaries(net: Trial, n: int) -> list[np.ndarray]:
    """Return every rank's ternaries [n], unpacked from its all-reduce payload with Python's integers."""
    width = math.ceil(math.log2(2 * net.world_size + 1))
    found = []
    for sent in net.log[-1].sent:
        fields = []
        for word in np.frombuffer(sent, "<i4").tolist():
            for _ in range(32 // width):  # the lowest field is its residue nearest to 0
                field = (word + net.world_size) % 2**width - net.world_size
                fields.append(field)
                word = (word - field) >> width
            assert word == 0
        found.append(np.array(fields[:n]))
    return found


@pytest.mark.parametrize("world_size", [1, 3, 8, 40])
def test_fields_are_ternaries_and_the_scaler_is_the_largest(world_size: int) -> None:
    n = 101
    net = Trial(hvdcompress.get_method("terngrad"), world_size)
    gradients = [(rank + 1) * numbers((n,), rank) for rank in range(world_size)]
    out = net.allreduce(gradients, "w", op="sum")[0]
    scalers = [np.frombuffer(sent, "<f4")[0] for sent in net.log[0].sent]
    np.testing.assert_allclose(scalers, [np.abs(clip_of_the_paper(g)).max() for g in gradients], rtol=1e-6)
    drawn = ternaries(net, n)
    for t, g in zip(drawn, gradients, strict=True):
        assert set(t.tolist()) <= {-1, 0, 1} and (t * g >= 0).all()
    np.testing.assert_array_equal(out, np.sum(drawn, axis=0).astype(np.float32) * max(scalers))


@pytest.mark.parametrize(
    "route,clip", [("reduce", 0.0), ("gather", 0.0), ("scatter", 0.0), ("reduce", 0.8), ("gather", 0.8)]
)
def test_mean_over_steps_is_the_clipped_gradient(route: str, clip: float) -> None:
    net = Loopback("terngrad", world_size=4, clip_factor=clip, route=route, min_elements=1)
    gradients = [numbers((60,), rank) for rank in range(4)]
    expected = np.mean([clip_of_the_paper(g, clip) if clip else g for g in gradients], axis=0, dtype=np.float64)
    assert_unbiased(net, gradients, expected, steps=150)


def test_unbiased_is_declared_without_clipping_only() -> None:
    assert hvdcompress.get_method("terngrad", clip_factor=0).unbiased
    assert not hvdcompress.get_method("terngrad").unbiased
    assert not hvdcompress.get_method("terngrad", clip_factor=0, feedback="plain").unbiased


def test_variance_is_that_of_ternaries() -> None:
    """E(s·b)² − g² = s·|g| − g² for each element, as P(b = 1) = |g|/s."""
    g, net = numbers((300,), 3), Loopback("terngrad", world_size=1, clip_factor=0, min_elements=1)
    outs = np.array([net.allreduce([g], "w")[0] for _ in range(800)], np.float64)
    expected = (np.abs(g).max() * np.abs(g) - g**2).sum()
    np.testing.assert_allclose(np.square(outs - g).mean(0).sum(), expected, rtol=0.05)


@pytest.mark.parametrize("value", [0.1, -3.0, 0.0, 1e37, -1e-40])
@pytest.mark.parametrize("n", [1, 2, 100])
@pytest.mark.parametrize("route", ROUTES)
def test_equal_elements_are_exact(route: str, n: int, value: float) -> None:
    g = np.full(n, value, np.float32)
    net = Loopback("terngrad", world_size=3, route=route, min_elements=1)
    np.testing.assert_allclose(net.allreduce([g] * 3, "w")[0], g, rtol=1e-6)


@pytest.mark.parametrize("route", ROUTES)
def test_nearly_equal_elements_are_not_clipped(route: str) -> None:
    """Their σ is far below their values: clipping to 2.5σ would remove nearly all of them."""
    g = (1 + 1e-4 * numbers((1000,), 5)).astype(np.float32)
    out = Loopback("terngrad", min_elements=1, world_size=2, route=route).allreduce([g, g], "w")[0]
    np.testing.assert_allclose(out, g, rtol=1e-3)


def test_errors_of_ranks_average_out() -> None:
    assert_errors_average_out("terngrad", clip_factor=0)


@pytest.mark.parametrize("world_size", [2, 5, 256])
def test_fields_hold_the_sum_of_equal_ternaries(world_size: int) -> None:
    """All ternaries are 1, or all −1: the sums are ±p, the most a field must hold."""
    g = np.where(np.arange(33) % 2, np.float32(-2), np.float32(2))
    net = Loopback("terngrad", world_size=world_size, min_elements=1)
    np.testing.assert_array_equal(net.allreduce([g] * world_size, "w")[0], g)


@pytest.mark.parametrize(
    "options,words", [({"clip_factor": -1}, "greater than or equal to 0"), ({"route": "x"}, "'reduce'")]
)
def test_wrong_settings_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        hvdcompress.get_method("terngrad", **options)
