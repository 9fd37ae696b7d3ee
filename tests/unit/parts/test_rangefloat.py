"""Range float: compared with its definition, bin by bin in plain Python, and its properties for any floats."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hvdcompress.method import Workspace
from hvdcompress.ops import numpy as ops
from hvdcompress.parts.codecs import codec
from hvdcompress.parts.rangefloat import HEAD, RangeFloatCodec
from hvdcompress.parts.wire import WireError
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
def test_beside_an_independent_oracle(x: np.ndarray, made: RangeFloatCodec) -> None:
    oracle = Oracle(x, made.bits, mantissa_of(x, made))
    codes, values = codes_of(x, made)
    used = oracle.P + oracle.Q
    assert used < 2**made.bits
    assert codes.tolist() == [oracle.encode(float(f)) for f in x]
    assert values.tolist() == [np.float32(oracle.decode(code)) for code in codes.tolist()]


@given(x=data, made=any_codec)
def test_monotone_idempotent_and_within_the_range(x: np.ndarray, made: RangeFloatCodec) -> None:
    codes, values = codes_of(x, made)
    assert codes.max(initial=0) < 2**made.bits
    assert np.isfinite(values).all()
    assert (np.diff(values[np.argsort(x, kind="stable")]) >= 0).all(), "not monotone"
    if x.size:
        assert min(x.min(), 0) <= values.min() and values.max() <= max(x.max(), 0), "beyond the range"
    bounds = ops.float_bounds(x)
    mantissa = mantissa_of(x, made)
    again = ops.range_codes(values, bounds, made.bits, mantissa)
    assert again.tolist() == codes.tolist(), "enc(dec(c)) is not c"
    same = RangeFloatCodec(made.bits, mantissa)
    assert codes_of(values, same)[1].tolist() == values.tolist(), "written again, it changes"


@pytest.mark.parametrize("bits,mantissa", [(4, 1), (6, 2), (8, 4), (9, 3), (10, 6), (12, 8)])
def test_every_code_stands_for_itself(bits: int, mantissa: int) -> None:
    for bounds in ([1.7, 0.4], [0.4, 1.7], [3.0, 0.0], [0.0, 3.0], [MAX, MAX], [1e-3, 1e3], [1.0, 1.0]):
        limits, codes = np.float32(bounds), np.arange(2**bits)
        values = ops.range_values(codes, limits, bits, mantissa)
        used = int(ops.range_codes(np.float32([-limits[1], limits[0]]), limits, bits, mantissa).max())
        assert ops.range_codes(values, limits, bits, mantissa)[: used + 1].tolist() == codes[: used + 1].tolist()
        # at most one code is unused: if two signs share an odd number of codes
        assert used + 1 >= 2**bits - (1 if min(bounds) > 0 else 0)


def test_data_of_one_sign_spend_no_code_on_the_other() -> None:
    x = np.exp(np.linspace(-20, 0, 5000)).astype(np.float32)
    made = RangeFloatCodec(8, 4)
    both = np.count_nonzero(codes_of(np.concatenate([x, -x]), made)[1][: x.size])
    for sign in (1, -1):
        codes, values = codes_of(sign * x, made)
        assert codes.max() == 255
        assert np.count_nonzero(values) > 1.9 * both, "16 octaves instead of 8"


@pytest.mark.parametrize("bits,mantissa", [(8, 4), (10, 6), (12, 8), (16, 12), (10, 3)])
def test_relative_error_is_half_a_bin(bits: int, mantissa: int) -> None:
    """The relative error on [eps, max] is below 2^−m if truncated, half of it if decoded to the middle."""
    x = np.random.default_rng(1).normal(size=100_000).astype(np.float32)
    codes, values = codes_of(x, RangeFloatCodec(bits, mantissa))
    coded = codes > 0
    error = np.abs(values - x)[coded] / np.abs(x)[coded]
    assert 0.9 * 2.0 ** -(mantissa + 1) < error.max() <= 2.0 ** -(mantissa + 1)
    assert np.abs(x[~coded]).max(initial=0) < np.abs(x[coded]).min(), "what is below eps is 0, and nothing else"
    shrinkage = (values[coded] * x[coded]).sum() / np.square(x[coded]).sum()
    assert abs(shrinkage - 1) < 2.0 ** -(mantissa + 5), "a decoder that truncates shrinks by half a bin"


def test_figures_on_gaussian_data() -> None:
    """‖decoded − f‖/‖f‖: 1.3 % for N = 8, m = 4 and 0.36 % for N = 10, m = 6, the best m for each."""
    x = np.random.default_rng(0).normal(size=100_000).astype(np.float32)
    assert error(x, 8, 4) == pytest.approx(0.0133, abs=5e-4)
    assert error(x, 10, 6) == pytest.approx(0.0036, abs=2e-4)
    for bits, mantissa in ((6, 2), (8, 4), (10, 6), (12, 8), (13, 8), (16, 11)):
        assert mantissa_of(x, RangeFloatCodec(bits)) == mantissa


def error(x: np.ndarray, bits: int, mantissa: int | None) -> float:
    """Return ‖decoded − x‖/‖x‖."""
    exact = x.astype(np.float64)
    return float(np.linalg.norm(codes_of(x, RangeFloatCodec(bits, mantissa))[1] - exact) / np.linalg.norm(exact))


def some_data() -> dict[str, np.ndarray]:
    rng, n = np.random.default_rng(0), 50_000
    made = {
        "normal": rng.normal(size=n),
        "uniform": rng.uniform(-1, 1, n),
        "student t, 2 degrees": rng.standard_t(2, n),
        "student t, 3 degrees": rng.standard_t(3, n),
        "cubes": rng.normal(size=n) ** 3,
        "lognormal": rng.lognormal(0, 2, n),
        "few, large": np.where(rng.random(n) < 0.01, rng.normal(0, 300, n), rng.normal(size=n)),
        "ends": np.r_[rng.uniform(0.9, 1, n), rng.uniform(-1, -0.9, n)],
        "huge": rng.normal(size=n) * 1e37,
    }
    return {name: x.astype(np.float32) for name, x in made.items()}


@pytest.mark.parametrize("bits", [5, 6, 7, 8, 9, 10, 12, 16])
@pytest.mark.parametrize("name", some_data())
def test_the_mantissa_of_the_least_error_is_chosen(name: str, bits: int) -> None:
    """Up to what a sample can tell. The next best mantissa errs up to twice as much, those beyond it far more."""
    x = some_data()[name]
    assert error(x, bits, None) <= 1.3 * min(error(x, bits, m) for m in range(1, bits))


def expected_error(x: np.ndarray, bits: int, mantissa: int) -> float:
    """Return the rule in plain Python: width²/12 for what has a code, x² for what has none."""
    oracle = Oracle(x, bits, mantissa)
    total = 0.0
    for f in map(float, x):
        width = math.ldexp(1.0, math.frexp(f)[1] - 1 - mantissa)
        total += width**2 / 12 if f and oracle.encode(f) else f**2
    return total


@given(
    st.lists(st.builds(lambda e, f: math.ldexp(f, e), st.integers(-30, 30), st.floats(-1, 1)), min_size=1, max_size=40),
    st.integers(3, 16),
)
def test_the_rule_of_the_choice_beside_plain_python(values: list[float], bits: int) -> None:
    x = np.float32(values)
    chosen = expected_error(x, bits, mantissa_of(x, RangeFloatCodec(bits)))
    least = min(expected_error(x, bits, m) for m in range(max(1, bits - 8), bits))
    # x² is taken at the middle of an eighth of an octave; values below 2^-19 of the largest are left out
    assert chosen <= 1.15 * least + 40 * float(np.abs(x).max()) ** 2 * 2.0**-36


def test_of_pairs_both_are_in_the_sample() -> None:
    """Real and imaginary parts alternate: the parts of one kind alone would say little about the range."""
    x = np.zeros(40_000, np.float32)
    x[1::2] = np.random.default_rng(0).standard_t(2, 20_000)
    assert mantissa_of(x, RangeFloatCodec(10)) == mantissa_of(np.roll(x, 1), RangeFloatCodec(10)) == 5


def test_names_of_codecs() -> None:
    for name, bits, mantissa in (("rangefloat8", 8, None), ("rangefloat16", 16, None), ("rangefloat4m1", 4, 1),
                                 ("rangefloat11m5", 11, 5)):  # fmt: skip
        made = codec(name)
        assert isinstance(made, RangeFloatCodec) and (made.bits, made.mantissa) == (bits, mantissa)
        assert made.code == 4


@pytest.mark.parametrize("x", [[], [0.0, 0.0, -0.0], [1e-45], [-3.5], [MAX], [-MAX, MAX], [1e37, -1e37], [1e-40, 1.0]])
@pytest.mark.parametrize("bits", [4, 8, 10, 16])
def test_special_tensors(x: list[float], bits: int) -> None:
    made = RangeFloatCodec(bits)
    values, mantissa = codes_of(np.float32(x), made)[1], mantissa_of(np.float32(x), made)
    for f, value in zip(np.float32(x), values, strict=True):
        if abs(f) == np.abs(np.float32(x)).max() and abs(f) > 1e-37:
            assert abs(value - f) <= abs(f) * 2.0**-mantissa
        assert value == 0 or np.sign(value) == np.sign(f)
    if len(x) == 1 and abs(x[0]) > 1e-37 and x[0] != MAX:
        assert values[0] == np.float32(x[0]), "the range's end may be met exactly"


@given(st.binary(max_size=40), st.integers(4, 16), st.integers(1, 22) | st.none())
def test_damaged_bytes_decode_to_something_finite_or_are_refused(data: bytes, bits: int, mantissa: int | None) -> None:
    made, buffer = RangeFloatCodec(bits, mantissa), np.frombuffer(data, np.uint8)
    for count in (0, 1, 7, 20):
        if len(buffer) != made.num_bytes(count):
            with pytest.raises(WireError, match="bytes of range floats, expected"):
                made.decode(buffer, count, ops)
        else:
            assert np.isfinite(made.decode(buffer, count, ops)).all()
    filled = np.resize(buffer, made.num_bytes(9)) if len(buffer) else np.full(made.num_bytes(9), 255, np.uint8)
    assert np.isfinite(made.decode(filled, 9, ops)).all()


def test_input_is_not_written_and_need_not_be_contiguous() -> None:
    x = np.random.default_rng(3).normal(size=200).astype(np.float32)
    kept = x.copy()
    x.flags.writeable = False
    made = RangeFloatCodec(9)
    strided = made.encode(x[::2], None, Workspace(ops))
    assert strided.tolist() == made.encode(x[::2].copy(), None, Workspace(ops)).tolist()
    assert (x == kept).all()
