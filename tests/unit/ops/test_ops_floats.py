"""Tests of ``floats.py`` in the backends; ``test_ops.py`` compares its ops with the reference.

``tests/unit/parts/test_rangefloat.py`` tests range floats.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pytest

from hvdcompress.ops.numba._kernels import halves as kernels
from hvdcompress.ops.numpy import ops as reference
from hvdcompress.ops.vectors import Half
from tests.unit.ops.calls import to_halves
from tests.unit.ops.comparing import Put, get, host
from tests.unit.ops.inputs import MAX

BITS = np.arange(2**16, dtype=np.uint16)
HALVES = BITS.view(np.float16)


def rounding_boundaries() -> np.ndarray:
    """Return all float16 numbers, the middles between neighbours, and the float32 numbers next to each middle."""
    exact = HALVES[np.isfinite(HALVES)].astype(np.float32)
    middle = (exact + np.roll(exact, 1)) / 2
    below, above = np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(MAX))
    return np.concatenate([exact, middle, below, above])


def bits(x: np.ndarray) -> Any:
    """Return floats for a comparison of bits in which all NaNs are equal."""
    return get(np.where(np.isnan(x), x.dtype.type(np.nan), x))


def test_conversions_of_every_half(backend: Any) -> None:
    step = 37 if type(backend).__name__ == "TritonOps" else 1  # its interpreter is slow
    put, x, halves = Put(backend), rounding_boundaries()[::step], HALVES[::step]
    with np.errstate(invalid="ignore"):
        for scale in (1.0, 3.0, 0.25):
            found = host(backend.dense(Half(put(halves), scale)))
            assert bits(found) == bits(np.clip(halves.astype(np.float32), -65504, 65504) * np.float32(scale))
        found = host(backend.dense(Half(put(BITS[::step].view(np.int16)), 1.0)))
        assert bits(found) == bits((BITS[::step].astype(np.uint32) << 16).view(np.float32))
    assert get(to_halves(backend, put(x), 1.0)) == get(to_halves(reference, x, 1.0))
    assert get(backend.to_bf16(put(x))) == get(reference.to_bf16(x))


def test_sums_of_every_half(native: Any) -> None:
    """Add halves of different sizes, Inf and NaN to all halves."""
    others = [0.0, -0.0, 2.0**-24, -(2.0**-15), 3.14, 65504.0, -65504.0, np.inf, -np.inf, np.nan]
    put = Put(native)
    with np.errstate(invalid="ignore", over="ignore"):
        for other in [*(np.full_like(HALVES, number) for number in others), np.roll(HALVES, 12345), -HALVES]:
            assert bits(host(native.add_all([put(HALVES), put(other)]))) == bits(HALVES + other)


@pytest.mark.parametrize("way", ["processor", "arithmetic"])
def test_kernels_convert_halves_as_numpy_does(way: str) -> None:
    """With the processor's instructions, and without them."""
    if way == "processor" and not kernels.CONVERTS:
        pytest.skip("this processor does not convert halves")
    float_of, half_of = getattr(kernels, f"float_by_{way}"), getattr(kernels, f"half_by_{way}")

    @numba.njit
    def convert(bits: Any, x: Any, values: Any, rounded: Any) -> None:
        for i in range(bits.size):
            values[i] = float_of(bits[i])
        for i in range(x.size):
            rounded[i] = half_of(x[i])

    edges = np.float32([65519.996, 65520.0, -65520.0, MAX, np.inf, -np.inf, 2.0**-25, 1e-45, -0.0])
    x = np.concatenate([rounding_boundaries(), edges])
    values, rounded = np.empty(BITS.size, np.float32), np.empty(x.size, np.uint16)
    convert(BITS, x, values, rounded)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(rounded, x.astype(np.float16).view(np.uint16))
    assert bits(values) == bits(HALVES.astype(np.float32))
