"""Number formats with levels, and the rotation: levels, bytes, errors next to qsgd's, damage."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hvdcompress.ops.numpy import ops
from hvdcompress.parts import rotation
from hvdcompress.parts.codecs import codec
from hvdcompress.parts.levels import FORMATS, LevelCodec, levels
from hvdcompress.parts.quantize import StochasticCodec
from hvdcompress.testing import numbers
from tests.unit.parts.test_quantize import context, read_back


def error(x: np.ndarray, made: object) -> float:
    """Return the relative error of x after a round trip."""
    found = read_back(x, made).astype(np.float64)
    return float(np.linalg.norm(found - x) / np.linalg.norm(x.astype(np.float64)))


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
def test_errors_are_those_of_the_method_pages(made: object, gaussian: float, heavy: float) -> None:
    rng = np.random.default_rng(0)
    for x, expected in ((rng.normal(size=1 << 15), gaussian), (rng.standard_t(3, size=1 << 15), heavy)):
        assert abs(error(x.astype(np.float32), made) - expected) <= 0.05 * expected


# -- rotation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 8, 100])
def test_rotation_is_a_hadamard_matrix_and_is_undone(n: int) -> None:
    x, block = numbers((n,), 4), 8
    y = rotation.rotate(x, block, context(), ops)
    assert len(y) == rotation.padded_size(n, block) == 8 * math.ceil(n / 8)
    np.testing.assert_allclose(rotation.rotate_back(y, n, block, context(), ops), x, atol=1e-6)
    signs = np.tile(rotation.signs(block, context(), x, ops), len(y) // block)
    matrix = np.array([[(-1.0) ** (a & b).bit_count() for a in range(block)] for b in range(block)])
    padded = np.concatenate([x, np.zeros(len(y) - n)]) * signs
    np.testing.assert_allclose(y.reshape(-1, block), padded.reshape(-1, block) @ matrix / block, atol=1e-5)
