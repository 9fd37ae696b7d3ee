"""Spectra: blockwise Fourier transforms (documented in :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

import numpy as np

from hvdcompress.ops.numpy.selection import top_k
from hvdcompress.ops.shared import bins, forward_scale, inverse_scale
from hvdcompress.ops.vectors import NumpyArray as Array
from hvdcompress.ops.vectors import Sparse, Spectra

_SLICE = 1 << 14  # pairs per slice: intermediate results stay in the processor's cache


def rfft(x: Array, block: int) -> Array:
    import scipy.fft  # imported here because only fft needs it, and the import takes longer than that of the package

    whole = x.size // block * block
    spectra = [np.zeros(0, np.complex64)]
    for part in (x[:whole].reshape(-1, block), x[whole:].reshape(1, -1)):
        if part.size:
            wave = part * np.float32(forward_scale(part.shape[1], block))
            spectra.append(scipy.fft.rfft(wave, overwrite_x=True).ravel())
    return (spectra[-1] if len(spectra) <= 2 else np.concatenate(spectra)).view(np.float32)


def irfft(spectrum: Array, n: int, block: int) -> Array:
    import scipy.fft  # as above

    whole, rest = n // block * block, n % block
    edge = n // block * (block // 2 + 1)
    bins = spectrum.view(np.complex64)
    parts = [np.zeros(0, np.float32)]
    if whole:
        parts.append(scipy.fft.irfft(bins[:edge].reshape(-1, block // 2 + 1), block, norm="forward").ravel())
    if rest:
        parts.append(scipy.fft.irfft(bins[edge:], rest, norm="forward") * np.float32(inverse_scale(rest, block)))
    return parts[-1] if len(parts) <= 2 else np.concatenate(parts)


def magnitudes(pairs: Array) -> Array:
    out = np.empty(pairs.size // 2, np.float32)
    for start in range(0, out.size, _SLICE):
        squares = np.square(pairs[2 * start : 2 * (start + _SLICE)], dtype=np.float64)
        np.sqrt(squares[::2] + squares[1::2], out=out[start : start + _SLICE], casting="same_kind")
    return out


def largest_frequencies(x: Array, block: int, k: int) -> Sparse:
    pairs = rfft(x, block)
    index = top_k(magnitudes(pairs), k)
    return Sparse(index, pairs.reshape(-1, 2)[index].ravel())


def inverse(spectra: Spectra) -> Array:
    """Return irfft(before · Σ shares) [n] of :class:`~hvdcompress.ops.vectors.Spectra`."""
    spectrum = np.zeros((bins(spectra.n, spectra.block), 2), np.float32)
    for share in spectra.shares:
        np.add.at(spectrum, share.index, share.values.reshape(-1, 2) * np.float32(spectra.before))
    return irfft(spectrum.ravel(), spectra.n, spectra.block)
