"""Range float: codes compared with their definition in plain Python, errors, and the choice of the mantissa."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hvdcompress.method import Workspace
from hvdcompress.ops.numpy import ops
from hvdcompress.parts.rangefloat import HEAD, RangeFloatCodec
from tests.oracles.rangefloat import Oracle, mantissa_of

MAX = float(np.finfo(np.float32).max)


def codes_of(x: np.ndarray, made: RangeFloatCodec) -> tuple[np.ndarray, np.ndarray]:
    """Return the codes in a buffer, and the values they decode to."""
    buffer = made.encode(x, None, Workspace(ops))
    head = HEAD + (made.mantissa is None)
    assert buffer.dtype == np.uint8 and len(buffer) == made.num_bytes(len(x)) == head + -(-len(x) * made.bits // 8)
    values = made.decode(buffer, len(x), ops)
    assert values.dtype == np.float32 and values.shape == x.shape
    return ops.unpack_bits(buffer[head:], made.bits, len(x)), values


floats = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.floats(-1, 1, width=32),
    st.sampled_from([0.0, -0.0, 1e-45, -1e-45, 1e-40, 1.1754944e-38, MAX, -MAX, 1.0, -1.0]),
)
data = st.lists(floats, max_size=30).map(lambda x: np.array(x, np.float32))
any_codec = st.builds(RangeFloatCodec, bits=st.integers(2, 16), mantissa=st.integers(1, 22) | st.none())


@given(x=data, made=any_codec)
@example(np.float32([MAX, -MAX, 1e37]), RangeFloatCodec(4, 1))
@example(np.float32([1e-45, -1e-45]), RangeFloatCodec(4, 22))
def test_codes_match_the_oracle(x: np.ndarray, made: RangeFloatCodec) -> None:
    oracle = Oracle(x, made.bits, mantissa_of(x, made))
    codes, values = codes_of(x, made)
    assert 2**made.bits > oracle.P + oracle.Q
    assert codes.tolist() == [oracle.encode(float(f)) for f in x]
    assert values.tolist() == [np.float32(oracle.decode(code)) for code in codes.tolist()]


@pytest.mark.parametrize("bits,mantissa", [(4, 1), (8, 4), (9, 3), (12, 8)])
def test_every_code_is_used_and_encodes_its_own_value(bits: int, mantissa: int) -> None:
    for bounds in ([1.7, 0.4], [0.4, 1.7], [3.0, 0.0], [0.0, 3.0], [MAX, MAX], [1e-3, 1e3], [1.0, 1.0]):
        limits, codes = np.float32(bounds), np.arange(2**bits)
        values = ops.range_values(codes, limits, bits, mantissa)
        used = int(ops.range_codes(np.float32([-limits[1], limits[0]]), limits, bits, mantissa).max())
        assert ops.range_codes(values, limits, bits, mantissa)[: used + 1].tolist() == codes[: used + 1].tolist()
        # at most one code is unused: if two signs share an odd number of codes
        assert used + 1 >= 2**bits - (1 if min(bounds) > 0 else 0)


def error(x: np.ndarray, bits: int, mantissa: int | None) -> float:
    """Return ‖decoded − x‖/‖x‖."""
    exact = x.astype(np.float64)
    return float(np.linalg.norm(codes_of(x, RangeFloatCodec(bits, mantissa))[1] - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize("bits,mantissa,expected", [(8, 4, 0.0133), (10, 6, 0.0036)])
def test_errors_on_gaussian_data_are_those_of_the_method_page(bits: int, mantissa: int, expected: float) -> None:
    x = np.random.default_rng(0).normal(size=100_000).astype(np.float32)
    assert error(x, bits, mantissa) == pytest.approx(expected, rel=0.04)
    assert mantissa_of(x, RangeFloatCodec(bits)) == mantissa


@pytest.mark.parametrize("bits", [5, 8, pytest.param(12, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["uniform", "student t", "lognormal", "outliers", "ends", "huge"])
def test_mantissa_of_the_least_error_is_chosen(name: str, bits: int) -> None:
    """Up to what a sample can tell. The next best mantissa errs up to twice as much, those beyond it far more."""
    rng, n = np.random.default_rng(0), 50_000
    x = {
        "uniform": lambda: rng.uniform(-1, 1, n),
        "student t": lambda: rng.standard_t(2, n),
        "lognormal": lambda: rng.lognormal(0, 2, n),
        "outliers": lambda: np.where(rng.random(n) < 0.01, rng.normal(0, 300, n), rng.normal(size=n)),
        "ends": lambda: np.r_[rng.uniform(0.9, 1, n), rng.uniform(-1, -0.9, n)],
        "huge": lambda: rng.normal(size=n) * 1e37,
    }[name]().astype(np.float32)
    assert error(x, bits, None) <= 1.3 * min(error(x, bits, m) for m in range(1, bits))


def test_sample_contains_both_elements_of_pairs() -> None:
    """Real and imaginary parts alternate: the parts of one kind alone would say little about the range."""
    x = np.zeros(40_000, np.float32)
    x[1::2] = np.random.default_rng(0).standard_t(2, 20_000)
    assert mantissa_of(x, RangeFloatCodec(10)) == mantissa_of(np.roll(x, 1), RangeFloatCodec(10)) == 5
