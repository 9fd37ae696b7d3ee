"""The codec of stochastic quantization: bytes, bias, variance, extremes, damage."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdcompress.method import Context, TensorSpec, Workspace
from hvdcompress.ops import numpy as ops
from hvdcompress.parts.codecs import codec
from hvdcompress.parts.quantize import StochasticCodec
from hvdcompress.parts.wire import WireError
from hvdcompress.testing import numbers

MAX = float(np.finfo(np.float32).max)
CODECS = [
    StochasticCodec(2, 16, "l2"),
    StochasticCodec(2, 64, "max"),
    StochasticCodec(4),
    StochasticCodec(8, 7, "l2"),
    StochasticCodec(3, 1, "max"),
]


def context(rank: int = 0, step: int = 0) -> Context:
    return Context(rank, 8, step, TensorSpec("w", (100,)), seed=3)


def read_back(x: np.ndarray, made: Any, ctx: Context | None = None, stream: int = 0) -> np.ndarray:
    buffer = made.encode(x, ctx or context(), Workspace(ops), stream)
    assert buffer.dtype == np.uint8 and len(buffer) == made.num_bytes(len(x))
    values = made.decode(buffer, len(x), ops)
    assert values.dtype == np.float32 and values.shape == x.shape
    return values


def draws(x: np.ndarray, made: Any, count: int) -> np.ndarray:
    """Encode and decode x at ``count`` steps; returns float64 [count, n]."""
    return np.array([read_back(x, made, context(step=step)) for step in range(count)], np.float64)


def norms_of(x: np.ndarray, made: StochasticCodec) -> np.ndarray:
    """Return the norm of every element's bucket, by definition."""
    parts = [x[i : i + made.bucket].astype(np.float64) for i in range(0, len(x), made.bucket)]
    norms = [np.sqrt((part**2).sum()) if made.norm == "l2" else np.abs(part).max() for part in parts]
    return np.repeat(norms, [len(part) for part in parts])


def test_the_names_of_values() -> None:
    assert codec("qsgd4") == StochasticCodec(bits=4, bucket=512, norm="max")
    assert codec("qsgd7").code == 3


@pytest.mark.parametrize("n", [0, 1, 2, 511, 512, 513, 1009])
@pytest.mark.parametrize("bits", [2, 3, 4, 7, 8])
def test_bytes_by_the_formula(n: int, bits: int) -> None:
    """One float32 per bucket, and exactly ``bits`` bits per value."""
    for bucket in (1, 100, 512, 10**6):
        made = StochasticCodec(bits, bucket)
        assert made.num_bytes(n) == 4 * math.ceil(n / bucket) + math.ceil(n * bits / 8)
        read_back(numbers((n,), n), made)


@pytest.mark.parametrize("made", CODECS, ids=str)
def test_the_mean_is_x(made: StochasticCodec) -> None:
    """A level is a Bernoulli variable, so the standard error of its mean is known."""
    x, count = numbers((100,), 1, kind="heavy"), 4000
    step = norms_of(x, made) / (2 ** (made.bits - 1) - 1)
    share = np.abs(x) / step % 1
    found = draws(x, made, count)
    allowed = 5 * step * np.sqrt(share * (1 - share) / count) + 4e-7 * np.abs(x)
    assert (np.abs(found.mean(0) - x) <= allowed + 20 * step / count).all()
    np.testing.assert_allclose(found.var(0).sum(), (step**2 * share * (1 - share)).sum(), rtol=0.05)
    # only the two nearest levels, and each about as often as it should
    assert (np.abs(found - x) <= step * (1 + 1e-5)).all()


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("n", [1, 16, 512])
@pytest.mark.parametrize("kind", ["normal", "heavy", "constant", "sparse"])
def test_variance_is_within_the_papers_bound(bits: int, n: int, kind: Any) -> None:
    """Lemma 3.1: E‖Q(v) − v‖² ≤ min(n/s², √n/s)·‖v‖² in a bucket of n with the l2-norm."""
    s, v = 2 ** (bits - 1) - 1, numbers((n,), 2, kind=kind)
    errors = np.square(draws(v, StochasticCodec(bits, n, "l2"), 200) - v).sum(1)
    bound = min(n / s**2, math.sqrt(n) / s) * float(np.square(v, dtype=np.float64).sum())
    assert errors.mean() - 3 * errors.std() / math.sqrt(200) <= bound


def test_the_bound_is_nearly_reached() -> None:
    """The bound is tight: with one level, the error of a constant vector is √n − 1 times its energy."""
    v = np.full(400, 0.5, np.float32)
    errors = np.square(draws(v, StochasticCodec(2, 400, "l2"), 400) - v).sum(1)
    assert 0.9 * (math.sqrt(400) - 1) < errors.mean() / 100.0 < math.sqrt(400)


def test_the_largest_magnitude_errs_less_than_the_l2_norm() -> None:
    v = numbers((512,), 3)
    error = [np.square(draws(v, StochasticCodec(4, 512, norm), 50) - v).mean() for norm in ("max", "l2")]
    assert 10 * error[0] < error[1]


@pytest.mark.parametrize("made", CODECS, ids=str)
def test_errors_of_ranks_and_streams_average_out(made: StochasticCodec) -> None:
    """Independent errors: the mean of m of them has 1/m of the variance; with equal errors it would have all of it."""
    x, m, steps = numbers((256,), 4), 16, 60
    alone = np.array([read_back(x, made, context(0, t)) - x for t in range(steps)])
    ranks = np.array([np.mean([read_back(x, made, context(r, t)) - x for r in range(m)], 0) for t in range(steps)])
    streams = np.array(
        [np.mean([read_back(x, made, context(0, t), stream=r) - x for r in range(m)], 0) for t in range(steps)]
    )
    expected = np.square(alone, dtype=np.float64).mean() / m
    for mean in (ranks, streams):
        assert 0.8 * expected <= np.square(mean, dtype=np.float64).mean() <= 1.25 * expected


def test_one_large_value_spoils_its_own_bucket_only() -> None:
    x = numbers((1024,), 5)
    x[3] = 1e6
    found = read_back(x, StochasticCodec(8, 512))
    assert np.abs(found - x)[512:].max() < 0.05 and np.count_nonzero(found[:512]) < 10


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
        step = np.minimum(norms_of(x, made), MAX) / (2 ** (bits - 1) - 1)
    assert np.isfinite(found).all()
    assert (np.abs(found - x) <= step * (1 + 1e-5) + 1.5e-45).all()
    assert (found * x >= 0).all()


@pytest.mark.parametrize("made", CODECS, ids=str)
@pytest.mark.parametrize("value", [0.0, 1e-45, -1e-40, 0.1, -1e37, MAX])
def test_constants(made: StochasticCodec, value: float) -> None:
    """With the maximum as the norm, levels are preserved to the bit; zeros always are."""
    for n in (1, 16, 100):
        x = np.full(n, value, np.float32)
        found = read_back(x, made)
        if made.norm == "max" or value == 0 or made.bucket == 1:
            np.testing.assert_array_equal(found, x)
        step = np.minimum(norms_of(x, made), MAX) / (2 ** (made.bits - 1) - 1)
        assert (np.abs(found.astype(np.float64) - x) <= step * (1 + 1e-5) + 1.5e-45).all()


@pytest.mark.parametrize("made", CODECS, ids=str)
def test_damaged_bytes_are_refused_or_read_as_finite(made: StochasticCodec) -> None:
    x, rng = numbers((100,), 6), np.random.default_rng(0)
    buffer = made.encode(x, context(), Workspace(ops))
    for length in (0, 1, len(buffer) - 1):
        with pytest.raises(WireError, match="bytes of quantized values"):
            made.decode(buffer[:length], 100, ops)
    with pytest.raises(WireError):
        made.decode(np.append(buffer, buffer[:1]), 100, ops)
    for _ in range(200):
        values = made.decode(rng.integers(0, 256, len(buffer)).astype(np.uint8), 100, ops)
        assert values.shape == (100,) and np.isfinite(values).all()
    for byte in (0, 255):
        assert np.isfinite(made.decode(np.full(len(buffer), byte, np.uint8), 100, ops)).all()
