"""Tests of ``spectra.py`` in the backends: its ops equal the reference to rounding only."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvdcompress.ops.numpy import ops as reference
from hvdcompress.ops.shared import bins
from hvdcompress.ops.vectors import Sparse, Spectra
from tests.unit.ops.calls import changed
from tests.unit.ops.comparing import Put, get, host
from tests.unit.ops.inputs import MAX, vector

#: n, block: empty, one element, a shorter last block of 1 and of more elements, prime length
SIZES = [(0, 4), (1, 1), (3, 1), (5, 4), (97, 97), (101, 16), (1030, 256)]


def spectra_of(x: np.ndarray, block: int) -> np.ndarray:
    """Return Σ x_j e^(−2πi jk/L) / √(L·block) for each block of L elements."""
    out = [np.zeros(0, complex)]
    for start in range(0, x.size, block):
        part = x[start : start + block].astype(np.float64)
        turns = np.outer(np.arange(part.size // 2 + 1), np.arange(part.size)) % part.size / part.size
        out.append(np.exp(-2j * np.pi * turns) @ part / np.sqrt(part.size * block))
    return np.concatenate(out).view(np.float64)


def pairs_of(ops: Any, x: Any, block: int) -> Any:
    """Return the whole spectrum."""
    return ops.largest_frequencies(x, block, bins(len(x), block)).values


def wave_of(ops: Any, spectrum: Any, n: int, block: int) -> Any:
    """Return the inverse transform of a whole spectrum."""
    index = ops.asarray(np.arange(bins(n, block)), like=spectrum)
    return ops.dense(Spectra([Sparse(index, spectrum)], n, block))


@pytest.mark.parametrize("n,block", SIZES)
def test_rfft_and_irfft_follow_their_definitions(native: Any, n: int, block: int) -> None:
    x, put = vector("normal", n), Put(native)
    expected = spectra_of(x, block)
    found = pairs_of(native, put(x), block)
    assert get(found)[:2] == ("float32", expected.shape)
    np.testing.assert_allclose(host(found), expected, atol=3e-7 * max(np.abs(expected).max(initial=0), 1e-9), rtol=0)
    back = wave_of(native, put(host(found)), n, block)
    assert get(back)[:2] == ("float32", (n,))
    np.testing.assert_allclose(host(back), x, atol=3e-6, rtol=0)
    # imaginary parts of the first and last bin, which a real signal does not have, are ignored
    spectrum = vector("normal", expected.size, seed=3)
    found = host(wave_of(native, put(spectrum), n, block))
    np.testing.assert_allclose(found, wave_of(reference, spectrum, n, block), atol=1e-5 * max(n, 1) ** 0.5, rtol=0)
    put.check()


@pytest.mark.parametrize("n,block", [(4096, 4096), (5000, 1024), (3, 3)])
def test_no_spectrum_exceeds_the_largest_element(native: Any, n: int, block: int) -> None:
    for x in (np.full(n, 1e37, np.float32), np.where(np.arange(n) % 2, 1e37, -1e37).astype(np.float32)):
        spectrum = host(pairs_of(native, Put(native)(x), block))
        assert np.isfinite(spectrum).all() and np.abs(spectrum).max() <= 1.000001e37


@pytest.mark.parametrize(
    "n,block,scale", [(1, 1, 1.0), (101, 16, 1.0), (1030, 256, 1e15), (8_200, 16, 1e-25), (70_001, 256, 1.0)]
)
def test_largest_frequencies_are_the_largest(native: Any, n: int, block: int, scale: float) -> None:
    blocks = vector("heavy", -(-n // block), 9) * np.float32(scale)  # of very different size
    x, put = vector("normal", n, 8) * np.repeat(blocks, block)[:n], Put(native)
    pairs = host(pairs_of(native, put(x), block)).reshape(-1, 2)
    size = np.hypot(*pairs.astype(np.float64).T).astype(np.float32)
    for k in {1, size.size // 100 or 1, size.size // 7 or 1, size.size}:
        index, found = map(host, native.largest_frequencies(put(x), block, k))
        put.check()
        assert get(index)[:2] == ("int32", (k,)) and (np.diff(index) > 0).all()
        np.testing.assert_allclose(found, pairs[index].ravel(), rtol=1e-4, atol=1e-6 * size.max())
        left_out = np.delete(size, index).max(initial=0)
        assert left_out <= size[index].min() * (1 + 1e-5) + 1e-6 * size.max()


@pytest.mark.parametrize("rows", [slice(0), 3, -2, slice(None)], ids=["zero", "first", "last", "constant"])
def test_largest_frequencies_that_no_sample_shows(native: Any, rows: Any) -> None:
    """All energy in one block, in none, or in one frequency of each: the first of equals are taken."""
    x = np.zeros((400, 16), np.float32)
    x[rows] = 1.0
    x[:, ::2] *= 3
    expected = reference.largest_frequencies(x.ravel(), 16, 50)
    found = native.largest_frequencies(Put(native)(x.ravel()), 16, 50)
    assert get(found.index) == get(expected.index)
    np.testing.assert_allclose(host(found.values), expected.values, atol=1e-6)


@pytest.mark.parametrize(
    "n,block,limit", [(1, 1, MAX), (5, 4, 0.5), (1030, 256, MAX), (1030, 256, 0.5), (300_000, 1024, MAX)]
)
@pytest.mark.parametrize("factor", [1.0, 0.25])
def test_spectra_are_decoded_to_the_inverse_of_their_sum(
    native: Any, n: int, block: int, limit: float, factor: float
) -> None:
    put, pairs = Put(native), np.zeros(2 * bins(n, block), np.float32)
    shares = [reference.largest_frequencies(vector("normal", n, rank), block, max(n // 5, 1)) for rank in range(3)]
    for share in shares:
        pairs.reshape(-1, 2)[share.index] += share.values.reshape(-1, 2)
    expected = factor * np.clip(wave_of(reference, pairs, n, block) / 2, -limit, limit)
    total = Spectra([Sparse(*map(put, share)) for share in shares], n, block, 2.0**-3, 2.0**2, limit)
    seven = np.full(n, 7, np.float32)
    written = changed(put, seven, lambda out: native.write(out, total, factor))
    left = changed(put, seven, lambda x: native.subtract(x, total, factor))
    np.testing.assert_allclose(host(written), expected, atol=1e-5)
    np.testing.assert_allclose(host(left), 7 - expected, atol=1e-5)
    put.check()


@pytest.mark.parametrize("index", [[0, 99_999], [-1, 3], [70_000, 5]])
def test_damaged_spectra_are_an_error(index: list[int]) -> None:
    numba_ops = pytest.importorskip("hvdcompress.ops.numba").ops
    share, out = Sparse(np.array(index, np.int32), np.ones(4, np.float32)), np.zeros(65_536, np.float32)
    with pytest.raises(IndexError):
        numba_ops.write(out, Spectra([share], out.size, 16), 1.0)
