"""Number formats with levels, and the rotation: levels, bytes, errors next to qsgd's, damage."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from hvdcompress.loopback import Loopback
from hvdcompress.ops import numpy as ops
from hvdcompress.parts import rotation
from hvdcompress.parts.codecs import codec
from hvdcompress.parts.levels import FORMATS, LevelCodec, levels
from hvdcompress.parts.quantize import StochasticCodec
from hvdcompress.parts.wire import WireError
from hvdcompress.testing import numbers
from tests.unit.parts.test_quantize import MAX, context, read_back


def error(x: np.ndarray, made: object) -> float:
    """The relative error of x after a round trip."""
    found = read_back(x, made).astype(np.float64)
    return float(np.linalg.norm(found - x) / np.linalg.norm(x.astype(np.float64)))


def test_the_names_of_values() -> None:
    assert codec("int8") == LevelCodec("int8", 256, "nearest")
    assert codec("natural") == LevelCodec("natural", rounding="stochastic")
    assert len({codec(name).code for name in (*FORMATS, "fp32", "fp16", "bf16", "qsgd4", "rangefloat8")}) == 12


@pytest.mark.parametrize("name", FORMATS)
def test_levels_ascend_and_have_both_signs(name: str) -> None:
    table = levels(name)
    assert (np.diff(table) > 0).all() and len(table) <= 2 ** FORMATS[name].bits
    mirrored = table[table > -1] if name == "dynamic8" else table  # −1 would be the 257th level
    np.testing.assert_array_equal(mirrored[mirrored < 0], -table[table > 0][: (mirrored < 0).sum()][::-1])
    assert 0.0 in table and (table[-1] == 1 or name == "natural")


@pytest.mark.parametrize(("name", "dtype"), [("fp8_e4m3", "float8_e4m3fn"), ("fp8_e5m2", "float8_e5m2")])
def test_float8_has_the_levels_of_torch(name: str, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    bits = torch.arange(256, dtype=torch.uint8).view(getattr(torch, dtype)).float().numpy()
    finite = np.unique(bits[np.isfinite(bits)])
    np.testing.assert_array_equal(levels(name), (finite.astype(np.float64) / finite.max()).astype(np.float32))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("n", [0, 1, 7, 256, 257, 1009])
def test_bytes_by_the_formula(name: str, n: int) -> None:
    for block in (4, 256, 4096):
        made = LevelCodec(name, block)
        scales = 0 if name == "natural" else 4 * math.ceil(n / block)
        assert made.num_bytes(n) == scales + math.ceil(n * FORMATS[name].bits / 8)
        read_back(numbers((n,), n), made)


@pytest.mark.parametrize("kind", ["normal", "heavy"])
@pytest.mark.parametrize("bits", [4, 8])
def test_nearest_errs_less_than_qsgd_at_equal_bytes(kind: str, bits: int) -> None:
    """At random the error is that of qsgd; to the nearest level it is smaller, by √2 or more."""
    x = numbers((1 << 14,), 1, kind=kind)
    qsgd, made = StochasticCodec(bits, 256), LevelCodec(f"int{bits}", 256)
    assert qsgd.num_bytes(len(x)) == made.num_bytes(len(x))
    assert error(x, made) < error(x, qsgd) / 1.3
    np.testing.assert_allclose(error(x, replace(made, rounding="stochastic")), error(x, qsgd), rtol=0.1)


def test_floats_and_the_dynamic_tree_err_less_on_heavy_tails() -> None:
    """Of 8 bits each: linear levels are best for normal data, and worst where a block has one large value."""
    normal, heavy = (numbers((1 << 14,), 2, kind=kind) for kind in ("normal", "heavy"))
    made = {name: LevelCodec(name) for name in ("int8", "fp8_e4m3", "dynamic8")}
    assert error(normal, made["int8"]) < min(error(normal, made["fp8_e4m3"]), error(normal, made["dynamic8"]))
    small = np.where(np.arange(len(heavy)) % 256 == 0, np.float32(1e4), normal)
    spoiled = {name: np.abs(read_back(small, one) - small)[small != 1e4].mean() for name, one in made.items()}
    assert max(spoiled["fp8_e4m3"], spoiled["dynamic8"]) < spoiled["int8"]


@pytest.mark.parametrize(
    ("made", "gaussian", "heavy"),
    [
        (LevelCodec("int8"), 0.0070, 0.016),
        (LevelCodec("int4"), 0.13, 0.27),
        (LevelCodec("fp8_e4m3"), 0.026, 0.024),
        (LevelCodec("fp8_e5m2"), 0.052, 0.048),
        (LevelCodec("dynamic8"), 0.011, 0.015),
        (LevelCodec("natural4"), 0.20, 0.18),
        (codec("natural"), 0.29, 0.28),
        (StochasticCodec(4, 256), 0.18, 0.39),
        (StochasticCodec(8, 256), 0.0099, 0.022),
    ],
    ids=str,
)
def test_errors_are_those_of_the_methods_pages(made: object, gaussian: float, heavy: float) -> None:
    rng = np.random.default_rng(0)
    for x, expected in ((rng.normal(size=1 << 15), gaussian), (rng.standard_t(3, size=1 << 15), heavy)):
        assert abs(error(x.astype(np.float32), made) - expected) <= 0.05 * expected


def test_natural_has_the_papers_variance() -> None:
    """E‖C(v) − v‖² ≤ ‖v‖²/8 (Theorem 1), without bias."""
    x = numbers((1000,), 3, kind="heavy")
    trials = np.array([read_back(x, codec("natural"), context(step=t)) for t in range(300)], np.float64)
    energy = float(np.square(x, dtype=np.float64).sum())
    assert np.square(trials - x).sum(axis=1).mean() <= energy / 8
    assert np.square(trials.mean(axis=0) - x).sum() < 2 * energy / 8 / 300
    powers = np.float32([0, 1, -0.5, 2.0**-126, -(2.0**127)])
    np.testing.assert_array_equal(read_back(powers, codec("natural")), powers)


@pytest.mark.parametrize("name", FORMATS)
def test_damaged_bytes_are_refused_or_read_as_finite(name: str) -> None:
    made, rng = LevelCodec(name, 16), np.random.default_rng(0)
    for length in (0, made.num_bytes(100) - 1, made.num_bytes(100) + 1):
        with pytest.raises(WireError, match=f"bytes of {name} values"):
            made.decode(np.zeros(length, np.uint8), 100, ops)
    for _ in range(50):
        damaged = rng.integers(0, 256, made.num_bytes(100)).astype(np.uint8)
        assert np.isfinite(made.decode(damaged, 100, ops)).all()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("value", [0.0, 1e-45, -1e-40, 0.1, -1e37, MAX])
def test_constants(name: str, value: float) -> None:
    found = read_back(np.full(100, value, np.float32), LevelCodec(name))
    assert np.isfinite(found).all()
    if name != "natural" and not (name == "dynamic8" and value < 0):
        np.testing.assert_array_equal(found, np.float32(value))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("method", ["topk", "scalecom", "powersgd"])
def test_methods_send_values_in_every_format(method: str, name: str) -> None:
    """Nothing is lost, and the bytes are those of the formula."""
    net = Loopback(method, world_size=2, values=name, min_elements=1)
    given = [numbers((40, 30), rank) for rank in range(2)]
    out = net.allreduce(given, "w", op="sum")[0]
    kept = sum(net.residual("w", rank).astype(np.float64) for rank in range(2))
    np.testing.assert_allclose(out + kept.reshape(40, 30), sum(given), atol=1e-4)


# -- rotation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 8, 100])
def test_the_rotation_is_a_hadamard_matrix_and_is_undone(n: int) -> None:
    x, block = numbers((n,), 4), 8
    y = rotation.rotate(x, block, context(), ops)
    assert len(y) == rotation.padded_size(n, block) == 8 * math.ceil(n / 8)
    np.testing.assert_allclose(rotation.rotate_back(y, n, block, context(), ops), x, atol=1e-6)
    signs = np.tile(rotation.signs(block, context(), x, ops), len(y) // block)
    matrix = np.array([[(-1.0) ** (a & b).bit_count() for a in range(block)] for b in range(block)])
    padded = np.concatenate([x, np.zeros(len(y) - n)]) * signs
    np.testing.assert_allclose(y.reshape(-1, block), padded.reshape(-1, block) @ matrix / block, atol=1e-5)


def test_the_rotation_spreads_a_large_value() -> None:
    """Four bits, one large value per block: the others are no longer rounded to zero."""
    x = np.where(np.arange(4096) % 256 == 3, np.float32(20), numbers((4096,), 5))
    errors = []
    for rotated in (False, True):
        net = Loopback("blockwise", world_size=1, values="int4", rotation=rotated, feedback="none", min_elements=1)
        errors.append(float(np.linalg.norm(net.allreduce([x], "w")[0] - x)))
    assert errors[1] < 0.5 * errors[0]
