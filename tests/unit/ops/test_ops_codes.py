"""The ops of ``codes.py``: random numbers, random rounding to levels, signs, and fields that add."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest

from hvdcompress.ops import numpy as reference
from tests.unit.ops.comparing import MAX, TINY, Put, call, changed, get, host, key, vector

KEY = key(5)


# -- compared to the bit, by test_ops.py --------------------------------------------------------------------------


def damaged(x: np.ndarray, count: int) -> np.ndarray:
    """Norms [count] as they might come over the wire."""
    return np.resize(np.concatenate([np.float32([np.nan, -np.inf, np.inf, -1]), x]), count)


def onto(bucket: int, bits: int, o: Any, put: Any, x: np.ndarray, r: np.ndarray) -> Any:
    """Codes that are written to memory that is there."""
    norms = reference.bucket_norms(x, bucket, "max")
    there, again = (np.full(-(-x.size * bits // 8), 7, np.uint8) for _ in range(2))
    found = []
    codes = changed(o, put, there, lambda out: o.quantize(put(x), put(norms), bucket, bits, KEY, out))
    by_max = changed(o, put, again, lambda out: found.append(o.quantize_max(put(x), bucket, bits, KEY, out)[0]))
    return codes, by_max, found[0]


def fields(width: int, limit: float, o: Any, put: Any, x: np.ndarray, r: np.ndarray) -> Any:
    """Ternaries, with a norm above the limit, or below, or of 0; as a new array, and written to one that is there."""
    there, found = np.full(-(-x.size // (32 // width)), 7, np.int32), []
    for norm in (2 * limit, 0.5 * limit, 0.0):
        rest = limit, put(np.float32([norm])), width, KEY
        found.append(o.quantize_fields(put(x), *rest))
        found.append(changed(o, put, there, lambda out, rest=rest: o.quantize_fields(put(x), *rest, out)))
    return tuple(found)


for count in (0, 1, 7, 5000):
    call("uniform")(lambda o, put, x, r, n=count: o.uniform(key(n), n, like=put(x)))
    call("uniform")(lambda o, put, x, r, n=count: o.uniform(KEY, n, like=put(x), start=2**31 - 3))
for bucket in (1, 3, 512, 1 << 62):
    for bits in (2, 3, 8):

        def both(o: Any, put: Any, x: Any, r: Any, norms: Any, b: int = bucket, w: int = bits) -> Any:
            packed = o.quantize(put(x), put(norms), b, w, KEY)
            again = put(reference.quantize(x, norms, b, w, KEY))
            return packed, o.dequantize(again, put(norms), b, w, x.size)

        call("quantize")(lambda o, put, x, r, f=both, b=bucket: f(o, put, x, r, reference.bucket_norms(x, b, "max")))
        call("quantize")(lambda o, put, x, r, f=both, b=bucket: f(o, put, x, r, reference.bucket_norms(x, b, "l2")))
        call("quantize")(lambda o, put, x, r, f=both: f(o, put, x, r, np.abs(r)))  # |x| beyond its norm as well
        call("dequantize")(
            lambda o, put, x, r, b=bucket, w=bits: o.dequantize(
                put(x.view(np.uint8)), put(damaged(x, 32 * x.size)), b, w, 32 * x.size // w
            )
        )
for bucket in (1, 3, 512, 1 << 62):
    for bits in range(2, 9):
        call("quantize_max")(partial(onto, bucket, bits))
for width in (2, 3, 4, 5, 6, 8, 16, 17):
    for limit in (0.4, 2.5, MAX):
        call("quantize_fields")(partial(fields, width, limit))
call("distinct_indices")(
    lambda o, put, x, r: tuple(o.distinct_indices(KEY, k, x.size + 1) for k in (1, x.size // 3 + 1, x.size + 1))
)
call("pack_signs")(lambda o, put, x, r: o.pack_signs(put(x)))
for scale in (0.0, 0.3, MAX, -1.0, np.nan, np.inf):
    call("unpack_signs")(
        lambda o, put, x, r, s=scale: o.unpack_signs(
            put(x.view(np.uint8)), put(np.float32([s])), max(32 * x.size - 5, 0)
        )
    )
for width in (2, 3, 5, 12, 17, 32):
    call("pack_fields")(lambda o, put, x, r, w=width: o.pack_fields(put(np.sign(x)), w))
    for bound in (1, 2 ** (width - 1) - 1):
        call("unpack_fields")(
            lambda o, put, x, r, w=width, b=bound: o.unpack_fields(put(x.view(np.int32)), w, x.size * (32 // w), b)
        )


# -- random numbers -----------------------------------------------------------------------------------------------


def hashed(i: int, word: int) -> float:
    """MurmurHash3's finalizer, twice, in Python's integers."""

    def mix(x: int) -> int:
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
            x = (x ^ x >> shift) * factor % 2**32
        return x

    return (mix(mix((i + word) % 2**32) ^ word) >> 8) / 2**24


def test_uniform_is_its_definition(backend: Any) -> None:
    like = Put(backend)(np.zeros(1, np.float32))
    for start in (0, 5, 2**31 - 2, 2**32 - 9):
        found = host(backend.uniform(KEY, 9, like, start))
        assert found.tolist() == [hashed(start + i, int(KEY[0])) for i in range(9)]


def test_uniform_is_uniform_and_independent(native: Any) -> None:
    n, like = 200_000, Put(native)(np.zeros(1, np.float32))
    u, v = (host(native.uniform(key(k), n, like)).astype(np.float64) for k in (1, 2))
    assert u.min() >= 0 and u.max() < 1
    counts = np.bincount((u * 100).astype(int), minlength=100)
    assert ((counts - n / 100) ** 2 / (n / 100)).sum() < 99 + 6 * math.sqrt(2 * 99), "chi-square"
    for other in (v, np.roll(u, 1), np.roll(u, 512)):
        assert abs(np.corrcoef(u, other)[0, 1]) < 5 / math.sqrt(n)


# -- levels -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", range(2, 9))
def test_levels_are_their_definition(backend: Any, bits: int) -> None:
    """Code by code, with the hash of above: ⌊a⌋ or one more, the sign on top, packed lowest bit first."""
    n, bucket, s = 203, 64, 2 ** (bits - 1) - 1
    x, put = vector("normal", n), Put(backend)
    norms = reference.bucket_norms(x, bucket, "max")
    stream, expected = 0, np.zeros(n)
    for i, v in enumerate(x):
        a = float(np.abs(v) / norms[i // bucket] * np.float32(s))
        level = math.floor(a) + (hashed(i, int(KEY[0])) < a - math.floor(a))
        expected[i] = math.copysign(level / s * float(norms[i // bucket]), v)
        stream |= (level | int(v < 0) << (bits - 1)) << (i * bits)
    packed = backend.quantize(put(x), put(norms), bucket, bits, KEY)
    assert host(packed).tobytes() == stream.to_bytes(-(-n * bits // 8), "little")
    found = host(backend.dequantize(packed, put(norms), bucket, bits, n))
    np.testing.assert_allclose(found, expected, rtol=2e-7)
    put.check()


@pytest.mark.parametrize("bits", [2, 5, 8])
def test_what_lies_on_a_level_stays_there(backend: Any, bits: int) -> None:
    s, put = 2 ** (bits - 1) - 1, Put(backend)
    x = np.tile(np.arange(-s, s + 1, dtype=np.float32), 100)
    norms = np.float32([s])
    for drawn in (KEY, key(6)):
        packed = backend.quantize(put(x), put(norms), x.size, bits, drawn)
        np.testing.assert_array_equal(host(backend.dequantize(packed, put(norms), x.size, bits, x.size)), x)


def test_there_is_one_zero(backend: Any) -> None:
    x, put = np.float32([-0.0, -TINY, 0.0, -1e-30, 1.0]), Put(backend)
    norms = np.float32([1.0])
    packed = backend.quantize(put(x), put(norms), 5, 4, KEY)
    found = host(backend.dequantize(packed, put(norms), 5, 4, 5))
    assert get(found) == get(np.float32([0, 0, 0, 0, 1]))


def test_the_sum_of_two_floats_is_as_exact_as_a_division() -> None:
    """The kernel's level·high + level·low, with high + low = 1/s, is the float32 next to level/s: for all levels."""
    numba_coded = pytest.importorskip("hvdcompress.ops.numba.coded")
    for bits in range(2, 9):
        high, low = numba_coded._inverse_levels(bits)
        level = np.arange(1 << (bits - 1), dtype=np.float32)
        assert get(level * high + level * low) == get(level / np.float32((1 << (bits - 1)) - 1)), bits


# -- indices without repeats ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 63, 1000, 65_537, 2**24 + 3, 2**31 - 1, 2**31, 2**33 + 1])
def test_distinct_indices_of_any_size(backend: Any, n: int) -> None:
    for k in {1, min(n, 700), min(n, 3000)}:
        found = backend.distinct_indices(key(k), k, n)
        assert found.dtype == (np.int32 if n < 2**31 else np.int64) and len(set(found.tolist())) == k
        assert found[0] >= 0 and found[-1] < n and (np.diff(found) > 0).all()
        assert get(found) == get(reference.distinct_indices(key(k), k, n))


# -- fields that add ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 8, 15, 16, 64, 1024])
def test_fields_add_without_carrying(backend: Any, world_size: int) -> None:
    """At the extremes too: all ranks −1, all ranks 1; and no sum on the way leaves int32."""
    width, rng = (2 * world_size).bit_length(), np.random.default_rng(world_size)
    assert 2 ** (width - 1) < 2 * world_size + 1 <= 2**width
    n, put = 70, Put(backend)
    values = rng.integers(-1, 2, (world_size, n)).astype(np.float32)
    values[:, 40:55], values[:, 55:] = 1, -1
    words = [host(backend.pack_fields(put(v), width)) for v in values]
    assert words[0].dtype == np.int32 and len(words[0]) == -(-n // (32 // width))
    sums = np.cumsum(words, axis=0, dtype=np.int64)
    assert np.abs(sums).max() < 2**31
    found = host(backend.unpack_fields(put(sums[-1].astype(np.int32)), width, n, world_size))
    np.testing.assert_array_equal(found, values.sum(0))
    assert found.dtype == np.float32


# -- memory -------------------------------------------------------------------------------------------------------


def test_unusual_memory_and_missing_norms_go_to_the_reference() -> None:
    numba_ops = pytest.importorskip("hvdcompress.ops.numba")
    x = vector("normal", 2000)
    frozen = x.copy()
    frozen.flags.writeable = False
    norms = reference.bucket_norms(x[::2], 100, "l2")
    assert get(numba_ops.bucket_norms(x[::2], 100, "l2")) == get(norms)
    assert get(numba_ops.quantize(x[::2], norms, 100, 4, KEY)) == get(reference.quantize(x[::2], norms, 100, 4, KEY))
    assert get(numba_ops.bucket_norms(frozen, 100, "max")) == get(reference.bucket_norms(frozen, 100, "max"))
    packed = reference.quantize(x, norms, 1000, 4, KEY)
    packed.flags.writeable = False
    for ops in (numba_ops, reference):
        with pytest.raises(IndexError):
            ops.quantize(x, norms[:1], 1000, 4, KEY)
        with pytest.raises(IndexError):
            ops.dequantize(packed.copy(), norms[:1], 1000, 4, 2000)
    assert get(numba_ops.dequantize(packed, norms, 1000, 4, 2000)) == get(
        reference.dequantize(packed, norms, 1000, 4, 2000)
    )


def test_a_bucket_may_be_larger_than_memory(backend: Any) -> None:
    x, put = vector("normal", 100), Put(backend)
    norms = backend.bucket_norms(put(x), 1 << 62, "max")
    packed = backend.quantize(put(x), norms, 1 << 62, 8, KEY)
    found = host(backend.dequantize(packed, norms, 1 << 62, 8, 100))
    assert np.abs(found - x).max() <= np.abs(x).max() / 127 * 1.0001


def test_places_above_2_to_the_24(native: Any) -> None:
    n, put = 2**24 + 3, Put(native)  # float32 cannot tell 2^24 and 2^24 + 1 apart
    places = np.array([5, 2**24 - 1, 2**24 + 1, 2**24 + 2])
    x = np.zeros(n, np.float32)
    x[places] = [1, -1, 1, -1]
    norms = native.bucket_norms(put(x), 512, "max")
    packed = native.quantize(put(x), norms, 512, 2, KEY)
    for found in (
        native.dequantize(packed, norms, 512, 2, n),
        native.unpack_fields(native.pack_fields(put(x), 3), 3, n, 1),
    ):
        assert np.flatnonzero(host(found)).tolist() == places.tolist()
        assert host(found)[places].tolist() == [1, -1, 1, -1]
    signs = host(native.unpack_signs(native.pack_signs(put(x)), put(np.float32([1])), n))
    assert np.flatnonzero(signs < 0).tolist() == [2**24 - 1, 2**24 + 2]
    ends = host(native.uniform(KEY, 2, put(x), start=n)).tolist()
    assert ends == [hashed(n, int(KEY[0])), hashed(n + 1, int(KEY[0]))]
