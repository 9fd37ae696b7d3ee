"""Spectra: blockwise Fourier transforms (documented in :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

import torch

from hvdcompress.ops.shared import bins, forward_scale, inverse_scale
from hvdcompress.ops.torch.selection import top_k
from hvdcompress.ops.torch.tensors import f32
from hvdcompress.ops.vectors import Array, Sparse, Spectra


def rfft(x: Array, block: int) -> Array:
    whole = len(x) // block * block
    spectra = [x.new_zeros(0)]
    for part, length in ((x[:whole], block), (x[whole:], len(x) - whole)):
        if len(part):
            wave = part.view(-1, length) * forward_scale(length, block)
            spectra.append(torch.view_as_real(torch.fft.rfft(wave)).reshape(-1))
    return spectra[-1] if len(spectra) <= 2 else torch.cat(spectra)


def irfft(spectrum: Array, n: int, block: int) -> Array:
    whole, rest = n // block * block, n % block
    edge = n // block * (block // 2 + 1)
    bins = torch.view_as_complex(spectrum.view(-1, 2))
    parts = [spectrum.new_zeros(0)]
    if whole:
        parts.append(torch.fft.irfft(bins[:edge].view(-1, block // 2 + 1), block, norm="forward").view(-1))
    if rest:
        parts.append(torch.fft.irfft(bins[edge:], rest, norm="forward") * inverse_scale(rest, block))
    return parts[-1] if len(parts) <= 2 else torch.cat(parts)


def magnitudes(pairs: Array) -> Array:
    return pairs.view(-1, 2).double().square().sum(1).sqrt().to(torch.float32)


def largest_frequencies(x: Array, block: int, k: int) -> Sparse:
    pairs = rfft(x, block)
    index = top_k(magnitudes(pairs), k)
    return Sparse(index, pairs.view(-1, 2)[index].view(-1))


def inverse(spectra: Spectra) -> Array:
    """Return irfft(before · Σ shares) [n] of :class:`~hvdcompress.ops.vectors.Spectra`."""
    spectrum = spectra.shares[0].values.new_zeros(bins(spectra.n, spectra.block), 2)
    for share in spectra.shares:
        spectrum.index_add_(0, share.index, share.values.view(-1, 2) * f32(spectra.before))
    return irfft(spectrum.view(-1), spectra.n, spectra.block)
