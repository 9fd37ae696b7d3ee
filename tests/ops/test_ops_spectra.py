"""The verbs of ``spectra.py``: blockwise Fourier transforms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from comparing import MAX, Put, call, chosen, get, vector

from hvdcompress.ops import numpy as reference

# -- compared to the bit, by test_ops.py --------------------------------------------------------------------------


call("magnitudes")(lambda o, put, x, r: o.magnitudes(put(np.stack([x, r], 1).ravel())))
call("pair_places")(lambda o, put, x, r: (o.pair_places(put(chosen(x))), o.pair_places(put(chosen(x).astype("int64")))))
call("rfft")(lambda o, put, x, r: None)  # to rounding only: below
call("irfft")(lambda o, put, x, r: None)


# -- transforms: the definition, in float64 -----------------------------------------------------------------------


def lengths(n: int, block: int) -> list[int]:
    return [block] * (n // block) + [n % block] * (n % block > 0)


def spectra_of(x: np.ndarray, block: int) -> np.ndarray:
    """By the definition: Σ x_j e^(−2πi jk/L) / √(L·block) for each block of L."""
    out, start = [], 0
    for length in lengths(x.size, block):
        turns = np.outer(np.arange(length // 2 + 1), np.arange(length)) % length / length
        part = x[start : start + length].astype(np.float64)
        out.append(np.exp(-2j * np.pi * turns) @ part / np.sqrt(length * block))
        start += length
    return np.concatenate([*out, np.zeros(0)]).astype(complex).view(np.float64)


SIZES = [
    (0, 4),
    (1, 1),
    (1, 4),
    (2, 2),
    (3, 1),
    (5, 4),
    (8, 8),
    (97, 97),
    (101, 16),
    (1009, 1009),
    (1024, 256),
    (1030, 256),
]


@pytest.mark.parametrize("n,block", SIZES)
def test_rfft_is_its_definition(backend: Any, n: int, block: int) -> None:
    x, put = vector("normal", n), Put(backend)
    found, expected = np.asarray(backend.rfft(put(x), block)), spectra_of(x, block)
    put.check()
    assert found.dtype == np.float32 and found.shape == expected.shape
    assert found.size == 2 * sum(length // 2 + 1 for length in lengths(n, block))
    np.testing.assert_allclose(found, expected, atol=3e-7 * max(np.abs(expected).max(initial=0), 1e-9), rtol=0)


@pytest.mark.parametrize("n,block", SIZES)
def test_irfft_undoes_rfft(backend: Any, n: int, block: int) -> None:
    x, put = vector("normal", n, seed=2), Put(backend)
    found = np.asarray(backend.irfft(put(np.asarray(backend.rfft(put(x), block))), n, block))
    put.check()
    assert found.dtype == np.float32 and found.shape == (n,)
    np.testing.assert_allclose(found, x, atol=3e-6, rtol=0)


@pytest.mark.parametrize("n,block", SIZES)
def test_irfft_of_any_spectrum_is_the_references(backend: Any, n: int, block: int) -> None:
    """Imaginary parts of DC and Nyquist included, which a real signal has not: they count for nothing."""
    put = Put(backend)
    spectrum = vector("normal", reference.rfft(np.zeros(n, np.float32), block).size, seed=3)
    found = np.asarray(backend.irfft(put(spectrum), n, block))
    put.check()
    np.testing.assert_allclose(found, reference.irfft(spectrum, n, block), atol=1e-5 * max(n, 1) ** 0.5, rtol=0)


def test_no_spectrum_exceeds_the_largest_element(backend: Any) -> None:
    for n, block in ((4096, 4096), (5000, 1024), (997, 997), (3, 4)):
        for x in (np.full(n, 1e37, np.float32), np.where(np.arange(n) % 2, 1e37, -1e37).astype(np.float32)):
            spectrum = np.asarray(backend.rfft(Put(backend)(x), min(block, n)))
            assert np.isfinite(spectrum).all() and np.abs(spectrum).max() <= 1.000001e37


def test_energy_is_kept_by_weights(backend: Any) -> None:
    """Parseval: Σx² is block times the sum of all |bins|², DC and Nyquist once, the others twice."""
    for n, block in ((64, 64), (63, 63), (100, 32), (101, 16)):
        x = vector("normal", n, seed=5)
        bins = np.asarray(backend.rfft(Put(backend)(x), block)).view(np.complex64)
        weights = np.concatenate(
            [np.r_[1, np.full((length - 1) // 2, 2), [1] * (length % 2 == 0)] for length in lengths(n, block)]
        )
        assert np.isclose(block * (weights * np.abs(bins) ** 2).sum(), np.square(x, dtype=np.float64).sum(), rtol=1e-5)


def test_magnitudes_neither_overflow_nor_vanish(backend: Any) -> None:
    pairs = np.float32([3e37, 4e37, 3e-40, 4e-40, 0, -0.0, MAX / 2, MAX / 2])
    found = np.asarray(backend.magnitudes(Put(backend)(pairs)))
    np.testing.assert_allclose(found, [5e37, 5e-40, 0, MAX / np.sqrt(2)], rtol=1e-5)


def test_pair_places_above_2_to_the_31(backend: Any) -> None:
    index = np.array([2**24 + 1, 2**31 - 1], np.int32)
    expected = np.array([2**25 + 2, 2**25 + 3, 2**32 - 2, 2**32 - 1], np.int64)
    assert get(backend.pair_places(Put(backend)(index))) == get(expected)
