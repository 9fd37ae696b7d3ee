"""The ops of ``floats.py``: 16-bit floats, and range floats (see also ``tests/unit/parts/test_rangefloat.py``)."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pytest

from hvdcompress.ops import numpy as reference
from hvdcompress.ops.numba._kernels import halves
from tests.unit.ops.comparing import MAX, Put, call, changed, get, host

# -- compared to the bit, by test_ops.py --------------------------------------------------------------------------


def to_halves(o: Any, *arguments: Any) -> tuple[Any, int]:
    """The result of ``to_fp16``; the number of clipped ones, which may be on a device, as an int."""
    half, clipped = o.to_fp16(*arguments)
    return half, int(clipped)


for scale in (1.0, 0.3, 2.0**-16):
    call("to_fp16")(lambda o, put, x, r, s=scale: to_halves(o, put(x), s))
    call("to_fp16")(lambda o, put, x, r, s=scale: to_halves(o, put(x), s, 65504.0 * (1 - 2**-9) / 3))
    call("from_fp16")(lambda o, put, x, r, s=scale: o.from_fp16(put(x.astype(np.float16)), s))
call("to_bf16")(lambda o, put, x, r: o.to_bf16(put(x)))
call("to_bf16")(
    lambda o, put, x, r: changed(o, put, np.full(2 * x.size, 7, np.uint8), lambda out: o.to_bf16(put(x), out))
)
call("from_bf16")(lambda o, put, x, r: o.from_bf16(put(reference.to_bf16(x))))
call("float_bounds")(lambda o, put, x, r: o.float_bounds(put(x)))
call("float_bounds")(lambda o, put, x, r: (o.float_bounds(put(np.abs(x))), o.float_bounds(put(-np.abs(x)))))
for bits, mantissa in ((4, 1), (8, 4), (10, 6), (16, 22)):
    for bounds in (np.float32([0, 0]), np.float32([1, 0]), np.float32([1e-45, MAX]), None):
        call("range_codes")(
            lambda o, put, x, r, b=bounds, n=bits, m=mantissa: o.range_codes(
                put(x), put(reference.float_bounds(x) if b is None else b), n, m
            )
        )
        call("range_values")(
            lambda o, put, x, r, b=bounds, n=bits, m=mantissa: o.range_values(
                put(x.view(np.uint32).astype(np.int64) & ((1 << n) - 1)),
                put(reference.float_bounds(x) if b is None else b),
                n,
                m,
            )
        )
for bits in (4, 10, 16):
    call("range_mantissa")(
        lambda o, put, x, r, n=bits: o.range_mantissa(put(x[:4096]), put(reference.float_bounds(x)), n)
    )
    call("range_codes")(
        lambda o, put, x, r, n=bits: o.range_codes(put(x), put(reference.float_bounds(x)), n, put(np.uint8([n // 2])))
    )
for mantissa in (0, 5, 255):  # a byte as it might come over the wire
    call("range_values")(
        lambda o, put, x, r, m=mantissa: o.range_values(
            put(np.arange(x.size, dtype=np.int64) % 1024), put(reference.float_bounds(x)), 10, put(np.uint8([m]))
        )
    )
call("range_values")(  # bounds as they might come over the wire
    lambda o, put, x, r: o.range_values(
        put(np.arange(x.size, dtype=np.int64) % 256), put(np.float32([np.nan, -np.inf])), 8, 4
    )
)


# -- every half ---------------------------------------------------------------------------------------------------


def test_conversions_of_every_half(backend: Any) -> None:
    put, bits = Put(backend), np.arange(2**16, dtype=np.uint16)
    halves = bits.view(np.float16)[~np.isnan(bits.view(np.float16))]
    for scale in (1.0, 3.0, 0.25):
        assert get(backend.from_fp16(put(halves), scale)) == get(reference.from_fp16(halves, scale))
    damaged = np.float16([np.nan, 1.0])
    with np.errstate(invalid="ignore"):
        assert np.isnan(host(backend.from_fp16(put(damaged), 1.0))[0])
    assert get(backend.from_bf16(put(bits))) == get(reference.from_bf16(bits))
    # both sides of every rounding boundary, and the boundary itself
    exact = halves[np.isfinite(halves)].astype(np.float32)
    middle = (exact + np.roll(exact, 1)) / 2
    for x in (exact, middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(MAX))):
        assert get(to_halves(backend, put(x), 1.0)) == get(to_halves(reference, x, 1.0))
        assert get(backend.to_bf16(put(x))) == get(reference.to_bf16(x))


def test_sums_of_every_half(backend: Any) -> None:
    """With one of every size, and with Inf and NaN."""
    put, halves = Put(backend), np.arange(2**16, dtype=np.uint16).view(np.float16)
    others = [0.0, -0.0, 2.0**-24, -(2.0**-15), 1.0, -1.5, 3.14, 1000.0, 65504.0, -65504.0, np.inf, -np.inf, np.nan]
    with np.errstate(invalid="ignore", over="ignore"):
        for other in [*(np.full_like(halves, number) for number in others), np.roll(halves, 12345), -halves]:
            want, found = halves + other, host(backend.add_all([put(halves), put(other)]))
            assert (np.isnan(found) == np.isnan(want)).all()
            numbers = ~np.isnan(want)
            np.testing.assert_array_equal(found[numbers].view(np.uint16), want[numbers].view(np.uint16))


@pytest.mark.parametrize("way", ["processor", "arithmetic"])
def test_kernels_convert_halves_as_numpy_does(way: str) -> None:
    """By the processor's instructions, and without them."""
    if way == "processor" and not halves.CONVERTS:
        pytest.skip("this processor does not convert halves")
    float_of, half_of = getattr(halves, f"float_by_{way}"), getattr(halves, f"half_by_{way}")

    @numba.njit
    def convert(bits: Any, x: Any, values: Any, rounded: Any) -> None:
        for i in range(bits.size):
            values[i] = float_of(bits[i])
        for i in range(x.size):
            rounded[i] = half_of(x[i])

    bits = np.arange(2**16, dtype=np.uint16)
    want = bits.view(np.float16).astype(np.float32)
    exact = want[np.isfinite(want)]
    middle = (exact + np.roll(exact, 1)) / 2
    below, above = np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(MAX))
    edges = np.float32([65519.996, 65520.0, -65520.0, MAX, np.inf, -np.inf, 2.0**-25, 1e-45, -0.0])
    x = np.concatenate([exact, middle, below, above, edges])
    values, rounded = np.empty_like(want), np.empty(x.size, np.uint16)
    convert(bits, x, values, rounded)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(rounded, x.astype(np.float16).view(np.uint16))
    numbers = ~np.isnan(want)
    assert np.isnan(values[~numbers]).all()
    np.testing.assert_array_equal(values[numbers].view(np.uint32), want[numbers].view(np.uint32))
