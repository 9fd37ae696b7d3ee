"""Spectra, compiled: transforms of pieces that stay in the processor's cache (see :class:`hvdcompress.ops.spec.Ops`).

For large tensors, the sum of the ranks' spectra is never in memory as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hvdcompress.ops import pool
from hvdcompress.ops.numba._kernels import spectra as kernels
from hvdcompress.ops.numba.arrays import int64, plain
from hvdcompress.ops.numba.memory import joined
from hvdcompress.ops.numpy import NumpyOps
from hvdcompress.ops.shared import forward_scale, inverse_scale
from hvdcompress.ops.vectors import NumpyArray as Array
from hvdcompress.ops.vectors import Sparse, Spectra

_PIECE = 1 << 18  # elements per piece, approximately: a piece and its spectrum stay in the processor's cache


def write_spectra(spectra: Spectra, factor: float, out: Array, subtract: bool) -> None:
    """Set out = factor times the decoded vector, or subtract that from ``out``."""
    import scipy.fft  # imported here because only fft needs it, and the import takes longer than that of the package

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


class SpectrumOps(NumpyOps):
    """Transforms of pieces that stay in the cache."""

    def largest_frequencies(self, x: Array, block: int, k: int) -> Sparse:
        if not plain(x) or not x.size:
            return super().largest_frequencies(x, block, k)
        spectra = []
        for part, length in _pieces(x, block):
            wave = np.multiply(part, np.float32(forward_scale(length, block)), out=pool.empty(part.size, np.float32))
            spectra.append(self.fft.rfft(wave.reshape(-1, length), overwrite_x=True).ravel())
        pairs = joined(spectra)
        squares = np.square(pairs.real, dtype=np.float64)  # the magnitudes are rounded once, as in the reference
        squares += np.square(pairs.imag, dtype=np.float64)
        index = self.top_k(np.sqrt(squares, out=squares).astype(np.float32), k)
        return Sparse(index, pairs[index].view(np.float32))
