"""Tests of ``codes.py`` in the backends; ``test_ops.py`` compares its ops with the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvdcompress.ops.numpy import ops as reference
from hvdcompress.ops.vectors import Codes, quantized_levels
from tests.unit.ops.comparing import Put, get, host
from tests.unit.ops.inputs import key

KEY = key(5)

# -- random numbers -----------------------------------------------------------------------------------------------


def hashed(i: int, word: int) -> float:
    """Return number i of a stream: MurmurHash3's finalizer, twice, in Python's integers."""

    def mix(x: int) -> int:
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
            x = (x ^ x >> shift) * factor % 2**32
        return x

    return (mix(mix((i + word) % 2**32) ^ word) >> 8) / 2**24


@pytest.mark.parametrize("start", [0, 5, 2**31 - 2, 2**32 - 9])
def test_uniform_numbers_are_hashes_of_their_index(native: Any, start: int) -> None:
    found = host(native.uniform(KEY, 9, Put(native)(np.zeros(1, np.float32)), start))
    assert found.tolist() == [hashed(start + i, int(KEY[0])) for i in range(9)]


@pytest.mark.parametrize("n", [1, 2, 5, 1000, 65_537, 2**31 - 1, 2**31, 2**33 + 1])
def test_distinct_indices_of_any_size(native: Any, n: int) -> None:
    for k in {1, min(n, 700), min(n, 3000)}:
        found = native.distinct_indices(key(k), k, n)
        assert found.dtype == (np.int32 if n < 2**31 else np.int64) and len(found) == k
        assert found[0] >= 0 and found[-1] < n and (np.diff(found) > 0).all()
        assert get(found) == get(reference.distinct_indices(key(k), k, n))


# -- levels -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 5, 8])
def test_elements_on_a_level_are_not_rounded(backend: Any, bits: int) -> None:
    """A backend that multiplied by the reciprocal of the norm would round some of them."""
    s, put = 2 ** (bits - 1) - 1, Put(backend)
    x, norms = np.tile(np.arange(-s, s + 1, dtype=np.float32), 9), np.float32([s])
    codes = backend.quantize(put(x), put(norms), x.size, bits, KEY)
    coded = Codes(codes, put(norms), x.size, quantized_levels(bits), bits, 0, x.size)
    np.testing.assert_array_equal(host(backend.dense(coded)), x)


def test_too_few_norms_are_an_error(backend: Any) -> None:
    put, norms = Put(backend), np.ones(1, np.float32)
    with pytest.raises(IndexError):
        backend.quantize(put(np.ones(100, np.float32)), put(norms), 50, 4, KEY)
    with pytest.raises(IndexError):
        backend.dense(Codes(put(np.zeros(50, np.uint8)), put(norms), 50, quantized_levels(4), 4, 0, 100))
