"""The ops of ``spectra.py``: blockwise Fourier transforms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvdcompress.ops import numpy as reference
from hvdcompress.ops.vectors import Sparse, Spectra
from tests.unit.ops.comparing import MAX, Put, call, changed, get, host, vector

# -- compared to the bit, by test_ops.py --------------------------------------------------------------------------


call("magnitudes")(lambda o, put, x, r: o.magnitudes(put(np.stack([x, r], 1).ravel())))
call("rfft")(lambda o, put, x, r: None)  # to rounding only: below
call("irfft")(lambda o, put, x, r: None)
call("largest_frequencies")(lambda o, put, x, r: None)


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
    found, expected = host(backend.rfft(put(x), block)), spectra_of(x, block)
    put.check()
    assert found.dtype == np.float32 and found.shape == expected.shape
    assert found.size == 2 * sum(length // 2 + 1 for length in lengths(n, block))
    np.testing.assert_allclose(found, expected, atol=3e-7 * max(np.abs(expected).max(initial=0), 1e-9), rtol=0)


@pytest.mark.parametrize("n,block", SIZES)
def test_irfft_undoes_rfft(backend: Any, n: int, block: int) -> None:
    x, put = vector("normal", n, seed=2), Put(backend)
    found = host(backend.irfft(put(host(backend.rfft(put(x), block))), n, block))
    put.check()
    assert found.dtype == np.float32 and found.shape == (n,)
    np.testing.assert_allclose(found, x, atol=3e-6, rtol=0)


@pytest.mark.parametrize("n,block", SIZES)
def test_irfft_of_any_spectrum_is_the_references(backend: Any, n: int, block: int) -> None:
    """Imaginary parts of DC and Nyquist included, which a real signal has not: they count for nothing."""
    put = Put(backend)
    spectrum = vector("normal", reference.rfft(np.zeros(n, np.float32), block).size, seed=3)
    found = host(backend.irfft(put(spectrum), n, block))
    put.check()
    np.testing.assert_allclose(found, reference.irfft(spectrum, n, block), atol=1e-5 * max(n, 1) ** 0.5, rtol=0)


def test_no_spectrum_exceeds_the_largest_element(backend: Any) -> None:
    for n, block in ((4096, 4096), (5000, 1024), (997, 997), (3, 4)):
        for x in (np.full(n, 1e37, np.float32), np.where(np.arange(n) % 2, 1e37, -1e37).astype(np.float32)):
            spectrum = host(backend.rfft(Put(backend)(x), min(block, n)))
            assert np.isfinite(spectrum).all() and np.abs(spectrum).max() <= 1.000001e37


def test_energy_is_kept_by_weights(backend: Any) -> None:
    """Parseval: Σx² is block times the sum of all |bins|², DC and Nyquist once, the others twice."""
    for n, block in ((64, 64), (63, 63), (100, 32), (101, 16)):
        x = vector("normal", n, seed=5)
        bins = host(backend.rfft(Put(backend)(x), block)).view(np.complex64)
        weights = np.concatenate(
            [np.r_[1, np.full((length - 1) // 2, 2), [1] * (length % 2 == 0)] for length in lengths(n, block)]
        )
        assert np.isclose(block * (weights * np.abs(bins) ** 2).sum(), np.square(x, dtype=np.float64).sum(), rtol=1e-5)


def test_magnitudes_neither_overflow_nor_vanish(backend: Any) -> None:
    pairs = np.float32([3e37, 4e37, 3e-40, 4e-40, 0, -0.0, MAX / 2, MAX / 2])
    found = host(backend.magnitudes(Put(backend)(pairs)))
    np.testing.assert_allclose(found, [5e37, 5e-40, 0, MAX / np.sqrt(2)], rtol=1e-5)


# -- the largest frequencies, and what is made of some -------------------------------------------------------------


def waves(n: int, block: int, scale: float = 1.0) -> np.ndarray:
    """Blocks of very different size."""
    return vector("normal", n, 8) * np.repeat(np.float32(scale) * vector("heavy", -(-n // block), 9), block)[:n]


@pytest.mark.parametrize("scale", [1.0, 1e-25, 1e15])
@pytest.mark.parametrize("n,block", [*SIZES[1:], (20_000, 32), (8_200, 16), (70_001, 256)])
def test_largest_frequencies_are_the_largest(backend: Any, n: int, block: int, scale: float) -> None:
    x, put = waves(n, block, scale), Put(backend)
    pairs = host(backend.rfft(put(x), block)).reshape(-1, 2)
    size = host(backend.magnitudes(put(pairs.ravel())))
    for k in {1, size.size // 100 or 1, size.size // 7 or 1, size.size}:
        index, found = map(host, backend.largest_frequencies(put(x), block, k))
        put.check()
        assert index.dtype == np.int32 and index.shape == (k,) and found.dtype == np.float32
        assert (np.diff(index) > 0).all()
        np.testing.assert_allclose(found, pairs[index].ravel(), rtol=1e-4, atol=1e-6 * size.max())
        left_out = np.delete(size, index)
        assert left_out.max(initial=0) <= size[index].min() * (1 + 1e-5) + 1e-6 * size.max()


@pytest.mark.parametrize("kind", ["zero", "first", "last", "constant"])
def test_largest_frequencies_of_blocks_that_no_sample_shows(backend: Any, kind: str) -> None:
    """All energy in one block, in none, or in one frequency of each: the first of equals are taken."""
    block, blocks = 16, 400
    x = np.zeros((blocks, block), np.float32)
    x[{"zero": slice(0), "first": 3, "last": -2, "constant": slice(None)}[kind]] = 1.0
    x[:, ::2] *= 3
    expected = reference.largest_frequencies(x.ravel(), block, 50)
    found = backend.largest_frequencies(Put(backend)(x.ravel()), block, 50)
    assert get(found.index) == get(expected.index)
    np.testing.assert_allclose(host(found.values), expected.values, atol=1e-6)


def spectra(n: int, block: int, ranks: int) -> list[Sparse]:
    return [reference.largest_frequencies(vector("normal", n, rank), block, max(n // 5, 1)) for rank in range(ranks)]


def lazy(put: Put, shares: list[Sparse], *rest: Any) -> Spectra:
    return Spectra([Sparse(put(share.index), put(share.values)) for share in shares], *rest)


@pytest.mark.parametrize("limit", [MAX, 0.5])
@pytest.mark.parametrize("n,block", [*SIZES[1:], (300_000, 1024)])
def test_waves_are_the_inverse_of_their_sum(backend: Any, n: int, block: int, limit: float) -> None:
    put, shares = Put(backend), spectra(n, block, 3)
    expected = 0.0
    for share in shares:
        pairs = np.zeros((reference.rfft(np.zeros(n, np.float32), block).size // 2, 2), np.float32)
        pairs[share.index] = share.values.reshape(-1, 2)
        expected = expected + reference.irfft(pairs.ravel(), n, block).astype(np.float64)
    expected = np.clip(expected / 2, -limit, limit)
    total = lazy(put, shares, n, block, 2.0**-3, 2.0**2, limit)
    for factor in (1.0, 0.25):
        out = changed(backend, put, np.full(n, 7, np.float32), lambda out, f=factor: backend.write(out, total, f))
        np.testing.assert_allclose(host(out), factor * expected, atol=1e-5)
        left = changed(backend, put, np.full(n, 7, np.float32), lambda x, f=factor: backend.subtract(x, total, f))
        np.testing.assert_allclose(host(left), 7 - factor * expected, atol=1e-5)
    put.check()


@pytest.mark.parametrize("index", [[3, 2], [0, 99_999], [-1, 3], [70_000, 5]])
def test_waves_that_are_damaged_write_nowhere_else(index: list[int]) -> None:
    numba_ops = pytest.importorskip("hvdcompress.ops.numba")
    share, out = Sparse(np.array(index, np.int32), np.ones(4, np.float32)), np.zeros(65_536, np.float32)
    if index == [3, 2]:  # what stays in its piece is as good as in order
        numba_ops.write(out, Spectra([share], out.size, 16), 1.0)
    else:
        with pytest.raises(IndexError):
            numba_ops.write(out, Spectra([share], out.size, 16), 1.0)
