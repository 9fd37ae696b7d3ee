"""Tests of ``statistics.py`` in the backends; ``test_ops.py`` compares all but ``moments`` with the reference."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from hvdcompress.ops.numpy import ops as reference
from hvdcompress.ops.scan import Scan
from hvdcompress.parts import select
from tests.unit.ops.comparing import Put
from tests.unit.ops.inputs import MAX, vector


@pytest.mark.parametrize("kind", ["normal", "constant", "special"])
@pytest.mark.parametrize("n", [0, 1, 257, 65_537])
def test_moments(backend: Any, kind: str, n: int) -> None:
    if n > 10**4 and type(backend).__name__ == "TritonOps":
        pytest.skip("takes too long in Triton's interpreter")
    x, put = vector(kind, n), Put(backend)
    expected = reference.moments(x)
    size = np.sqrt(np.square(x, dtype=np.float64).mean()) if n else 0.0
    found = backend.moments(put(x))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12 * size)
    if kind == "normal":  # Gaussian-k must compute the same float32 threshold everywhere
        assert len({np.float32(select.gaussian_threshold(*m, 0.01)) for m in (found, expected)}) == 1


@pytest.mark.parametrize("value", [0.1, -3e37, 1e-30])
def test_standard_deviation_of_equal_elements_is_zero(backend: Any, value: float) -> None:
    assert backend.moments(Put(backend)(np.full(1000, value, np.float32)))[1] == 0.0


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_inspect_notices_an_element_that_is_not_finite(backend: Any, bad: float) -> None:
    x = np.full(1000, MAX, np.float32)
    assert backend.inspect(Put(backend)(x), Scan()).finite
    for place in (0, 300, 999):
        x[:] = MAX
        x[place] = bad
        with np.errstate(all="ignore"):
            assert not backend.inspect(Put(backend)(x), Scan()).finite


@pytest.mark.parametrize("n", [0, 1, 1000, 65_537])
@pytest.mark.parametrize("size", [1e-45, 1e-30, 1.0, 1e37])
def test_l2_norm_neither_overflows_nor_vanishes(native: Any, size: float, n: int) -> None:
    x = (vector("normal", n).clip(-3, 3) * np.float32(size)).astype(np.float32)
    expected = math.sqrt(math.fsum(float(value) ** 2 for value in x))
    assert native.l2_norm(Put(native)(x)) == pytest.approx(expected, rel=1e-12, abs=0)


@pytest.mark.parametrize("n,bucket", [(1, 1), (7, 3), (512, 512), (1500, 1025), (4099, 10**9)])
@pytest.mark.parametrize("kind", ["heavy", "special", "constant"])
def test_bucket_norms_are_exact(kind: str, n: int, bucket: int) -> None:
    x = vector(kind, n)
    parts = [x[i : i + bucket].astype(np.float64) for i in range(0, n, bucket)]
    norms = {
        "max": [np.abs(part).max() for part in parts],
        "l2": [min(math.sqrt(math.fsum(part**2)), MAX) for part in parts],
        "mean": [math.fsum(np.abs(part)) / len(part) for part in parts],
    }
    for norm, expected in norms.items():
        np.testing.assert_array_equal(reference.bucket_norms(x, bucket, norm), np.float32(expected))


@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("scale", [1e-45, 1e-38, 1.0, 1e37, MAX / 8])
def test_no_element_exceeds_its_norm(norm: str, scale: float) -> None:
    """A larger element would need a level above the highest one."""
    rng = np.random.default_rng(0)
    x = (scale * rng.normal(size=(2000, 4))).astype(np.float32)
    x[:, 1:] *= (10.0 ** -rng.uniform(0, 9, (2000, 3))).astype(np.float32)
    norms = reference.bucket_norms(x.ravel(), 4, norm)
    assert np.isfinite(norms).all() and (np.abs(x).max(1) <= norms).all()
