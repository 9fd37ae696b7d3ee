"""Spectra, compiled: transforms of pieces that stay in the processor's cache (see :class:`hvdcompress.ops.spec.Ops`).

For large tensors, neither the spectrum nor the sum of the ranks' spectra is ever in memory as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np

from hvdcompress.ops import pool
from hvdcompress.ops.numba._kernels import spectra as kernels
from hvdcompress.ops.numba.arrays import int64, plain
from hvdcompress.ops.numba.memory import joined
from hvdcompress.ops.numba.selection import indices_of_largest
from hvdcompress.ops.numpy import NumpyOps
from hvdcompress.ops.shared import bins, forward_scale, index_dtype, inverse_scale
from hvdcompress.ops.vectors import NumpyArray as Array
from hvdcompress.ops.vectors import Sparse, Spectra

_PIECE = 1 << 18  # elements per piece, approximately: a piece and its spectrum stay in the processor's cache
_FEW = 128  # up to this number of blocks, the spectrum stays in the cache and is computed once
_SAMPLE = 16  # number of blocks that are sampled to estimate the k-th magnitude
_SURPLUS = 1.3  # the estimate aims at this multiple of k frequencies


def _strong(spectra: Iterable[Array], least: float) -> tuple[Array, Array]:
    """Return the indices and pairs of all frequencies with magnitudes ≥ ``least``, and possibly of some below.

    Args:
        spectra: The pairs of a tensor, piece by piece.
        least: The magnitude.
    """
    unit = 2.0 ** -max(math.frexp(least)[1], -126)  # so that the square of ``least`` does not underflow
    # the factor below 1 covers the rounding of the squares and their sum
    low = np.float32((least * unit) ** 2 * (1 - 2.0**-20))
    indices = []
    pairs = []
    first = 0
    for spectrum in spectra:
        index = pool.empty(spectrum.size // 2, np.int64)
        found = pool.empty(spectrum.size, np.float32)
        count = kernels.strong(spectrum, np.float32(unit), low, first, index, found)
        indices.append(index[:count].copy())
        pairs.append(found[: 2 * count].copy())
        first += spectrum.size // 2
    return np.concatenate(indices).astype(index_dtype(first)), np.concatenate(pairs)


def _spectra(x: Array, block: int) -> Iterator[Array]:
    import scipy.fft  # imported here because only fft needs it, and the import takes longer than that of the package

    for part, length in _pieces(x, block):
        wave = np.multiply(part, np.float32(forward_scale(length, block)), out=pool.empty(part.size, np.float32))
        yield scipy.fft.rfft(wave.reshape(-1, length), overwrite_x=True).ravel().view(np.float32)


def write_spectra(spectra: Spectra, factor: float, out: Array, subtract: bool) -> None:
    """Set out = factor times the decoded vector, or subtract that from ``out``."""
    import scipy.fft  # as above

    shares = [Sparse(int64(share.index), share.values) for share in spectra.shares]
    begins = [0] * len(shares)
    first = 0
    for part, length in _pieces(out, spectra.block):
        rows = part.size // length
        spectrum = np.zeros(rows * (length // 2 + 1), np.complex64)
        last = first + spectrum.size
        for number, (index, pairs) in enumerate(shares):
            begin, end = begins[number], max(begins[number], int(np.searchsorted(index, last)))
            piece = index[begin:end], pairs[2 * begin : 2 * end]
            kernels.add_pairs(spectrum.view(np.float32), first, *piece, np.float32(spectra.before))
            begins[number] = end
        wave = scipy.fft.irfft(spectrum.reshape(rows, -1), length, norm="forward").ravel()
        if length != spectra.block:
            wave *= np.float32(inverse_scale(length, spectra.block))
        kernels.clipped(wave, np.float32(spectra.after), np.float32(spectra.limit), np.float32(factor), part, subtract)
        first = last
    if any(begin != share.index.size for begin, share in zip(begins, shares, strict=True)):
        raise IndexError("the index of a frequency is outside of the spectrum")


def _pieces(x: Array, block: int) -> Iterator[tuple[Array, int]]:
    """Yield (elements, block length): the whole blocks of ``x``, several at a time, then the shorter last block."""
    whole = x.size // block * block
    step = max(_PIECE // block, 1) * block
    for start in range(0, whole, step):
        yield x[start : min(start + step, whole)], block
    if whole < x.size:
        yield x[whole:], x.size - whole


def _magnitudes(pairs: Array) -> Array:
    out = np.empty(pairs.size // 2, np.float32)
    kernels.magnitudes(pairs, out)
    return out


def _some_blocks(x: Array, block: int) -> Array:
    blocks = x[: x.size // block * block].reshape(-1, block)
    return blocks[:: blocks.shape[0] // _SAMPLE].ravel()


class SpectrumOps(NumpyOps):
    """Transforms of pieces that stay in the cache."""

    def largest_frequencies(self, x: Array, block: int, k: int) -> Sparse:
        if not plain(x) or not x.size:
            return super().largest_frequencies(x, block, k)
        few = x.size // block < _FEW
        whole = list(_spectra(x, block)) if few else []
        low = self._sampled(
            joined(whole) if few else joined(list(_spectra(_some_blocks(x, block), block))), k / bins(x.size, block)
        )
        for least in (low, low / 4, 0.0):  # try again if the estimate was too high
            index, pairs = _strong(whole or _spectra(x, block), least)
            found = _magnitudes(pairs)
            if np.count_nonzero(found >= least) >= k:  # then the k largest are among these
                break
        chosen, _ = indices_of_largest(found, k)
        return Sparse(index[chosen], pairs.view(np.complex64)[chosen].view(np.float32))

    def _sampled(self, pairs: Array, share: float) -> float:
        """Estimate from a sample of pairs a magnitude that somewhat more than ``share`` of all frequencies reach."""
        some = pairs.view(np.complex64)[:: (pairs.size >> 15) | 1]  # odd: not always the same bins
        found = _magnitudes(np.ascontiguousarray(some).view(np.float32))
        count = min(round(_SURPLUS * share * found.size) + 30, found.size)
        return self.kth_magnitude(found, count)
