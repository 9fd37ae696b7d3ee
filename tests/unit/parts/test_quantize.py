"""The codec of stochastic quantization: bytes, bias, variance, extremes, damage."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdcompress.method import Context, TensorSpec, Workspace
from hvdcompress.ops.numpy import ops
from hvdcompress.parts.quantize import StochasticCodec
from hvdcompress.testing import numbers

MAX = float(np.finfo(np.float32).max)
CODECS = [StochasticCodec(2, 16, "l2"), StochasticCodec(4), StochasticCodec(3, 1, "max")]


def context(rank: int = 0, step: int = 0) -> Context:
    return Context(rank, 8, step, TensorSpec("w", (100,)), seed=3)


def read_back(x: np.ndarray, made: Any, ctx: Context | None = None, stream: int = 0) -> np.ndarray:
    """Encode and decode x."""
    buffer = made.encode(x, ctx or context(), Workspace(ops), stream)
    assert buffer.dtype == np.uint8 and len(buffer) == made.num_bytes(len(x))
    values = made.decode(buffer, len(x), ops)
    assert values.dtype == np.float32 and values.shape == x.shape
    return values


def draws(x: np.ndarray, made: Any, count: int) -> np.ndarray:
    """Encode and decode x at ``count`` steps; returns float64 [count, n]."""
    return np.array([read_back(x, made, context(step=step)) for step in range(count)], np.float64)


def level_distance(x: np.ndarray, made: StochasticCodec) -> np.ndarray:
    """Return the distance of the levels around every element, by definition."""
    parts = [x[i : i + made.bucket].astype(np.float64) for i in range(0, len(x), made.bucket)]
    norms = [np.sqrt((part**2).sum()) if made.norm == "l2" else np.abs(part).max() for part in parts]
    return np.minimum(np.repeat(norms, [len(part) for part in parts]), MAX) / (2 ** (made.bits - 1) - 1)


@pytest.mark.parametrize("made", CODECS, ids=str)
def test_mean_is_x(made: StochasticCodec) -> None:
    """A level is a Bernoulli variable, so the standard error of its mean is known."""
    x, count = numbers((100,), 1, kind="heavy"), 1000
    distance = level_distance(x, made)
    share = np.abs(x) / distance % 1
    found = draws(x, made, count)
    allowed = 5 * distance * np.sqrt(share * (1 - share) / count) + 4e-7 * np.abs(x)
    assert (np.abs(found.mean(0) - x) <= allowed + 20 * distance / count).all()
    np.testing.assert_allclose(found.var(0).sum(), (distance**2 * share * (1 - share)).sum(), rtol=0.05)


def test_errors_of_ranks_and_streams_average_out() -> None:
    """Independent errors: the mean of m of them has 1/m of the variance; with equal errors it would have all of it."""
    x, m, steps, made = numbers((256,), 4), 16, 40, StochasticCodec(4)
    alone = draws(x, made, steps) - x
    ranks = np.mean([[read_back(x, made, context(r, t)) for t in range(steps)] for r in range(m)], axis=0) - x
    streams = np.mean([[read_back(x, made, context(0, t), r) for t in range(steps)] for r in range(m)], axis=0) - x
    expected = np.square(alone).mean() / m
    for mean in (ranks, streams):
        assert 0.8 * expected <= np.square(mean, dtype=np.float64).mean() <= 1.25 * expected


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=40),
    st.integers(2, 8),
    st.sampled_from([1, 3, 512]),
    st.sampled_from(["max", "l2"]),
)
def test_any_floats_are_read_as_a_neighbour(values: list[float], bits: int, bucket: int, norm: Any) -> None:
    x, made = np.array(values, np.float32), StochasticCodec(bits, bucket, norm)
    found = read_back(x, made).astype(np.float64)
    with np.errstate(over="ignore"):
        distance = level_distance(x, made)
    assert np.isfinite(found).all()
    assert (np.abs(found - x) <= distance * (1 + 1e-5) + 1.5e-45).all()
    assert (found * x >= 0).all()
