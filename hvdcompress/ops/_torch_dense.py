"""Verbs on torch tensors for numbers, transforms and matrices; ``_numpy_dense.py`` is their reference."""

from __future__ import annotations

import numpy as np
import torch

from hvdcompress.method import Array

__all__ = ["float_bounds", "irfft", "magnitudes", "pair_places", "range_codes", "range_values", "rfft", "scaled"]

_LARGEST = 0x7F7FFFFF  # the bits of the largest float32
_MAX = float(np.finfo(np.float32).max)


# -- range float -----------------------------------------------------------------------------------


def float_bounds(x: Array) -> Array:
    """The largest positive x and the largest magnitude of a negative one [2] float32; 0 where there is none."""
    if not len(x):
        return x.new_zeros(2)
    return torch.stack([x.max(), -x.min()]).clamp(min=0) + 0.0  # -0 becomes 0


def _range_space(bounds: Array, bits: int, shift: int) -> tuple[Array, Array, Array, Array]:
    """The bounds' bits [2], the first bin, and the number of positive and of negative codes, each [1] int32."""
    edges = bounds.view(torch.int32).clamp(0, _LARGEST)  # damaged ones become some finite range
    top, low = edges[:1] >> shift, edges[1:] >> shift
    room = (1 << bits) - 1  # one code is zero
    # the least bin from which both sides together, and each alone, fit the room; 0 holds zero itself
    first = torch.maximum((top + low + 3 - room) >> 1, torch.maximum(top, low) + 1 - room).clamp(min=1)
    return edges, first, (top - first + 1).clamp(min=0), (low - first + 1).clamp(min=0)


def range_codes(x: Array, bounds: Array, bits: int, mantissa: int) -> Array:
    """x [n] -> range-float codes [n] int32, below 2^bits, for the range of :func:`float_bounds`."""
    shift = 23 - mantissa
    _, first, positive, negative = _range_space(bounds, bits, shift)
    bits_of_x = x.contiguous().view(torch.int32)
    number = ((bits_of_x & 0x7FFFFFFF) >> shift) - (first - 1)  # from 1 on for |x| ≥ eps
    below = torch.minimum(number, negative)
    codes = torch.where(bits_of_x < 0, torch.where(below > 0, positive + below, 0), torch.minimum(number, positive))
    return codes.clamp(min=0)


def range_values(codes: Array, bounds: Array, bits: int, mantissa: int) -> Array:
    """The middles of the codes' bins, none beyond the range [n] float32; codes that cannot be read as the nearest."""
    shift = 23 - mantissa
    edges, first, positive, negative = _range_space(bounds, bits, shift)
    codes = torch.minimum(codes.to(torch.int32), positive + negative)
    minus = codes > positive
    number = torch.where(minus, codes - positive, codes)
    middle = ((number + (first - 1)) << shift) + (1 << (shift - 1))
    middle = torch.minimum(middle, torch.where(minus, edges[1:], edges[:1]))
    return torch.where(codes == 0, 0, torch.where(minus, middle | -0x80000000, middle)).view(torch.float32)


# -- spectra ---------------------------------------------------------------------------------------


def rfft(x: Array, block: int) -> Array:
    """x [n] -> the spectra of its blocks one after another, real and imaginary parts in turns [2·bins] float32.

    The last block may be shorter; L elements have ⌊L/2⌋ + 1 bins. A spectrum is divided by √(L·block): bins of
    all blocks then compare as their energies do, and none exceeds max|x|, so that nothing overflows.
    """
    whole = len(x) // block * block
    spectra = [x.new_zeros(0)]
    for part, length in ((x[:whole], block), (x[whole:], len(x) - whole)):
        if len(part):
            scale = float(np.float32((length * block) ** -0.5))
            spectra.append(torch.view_as_real(torch.fft.rfft(part.view(-1, length) * scale)).reshape(-1))
    return spectra[-1] if len(spectra) <= 2 else torch.cat(spectra)


def irfft(spectrum: Array, n: int, block: int) -> Array:
    """The inverse of :func:`rfft` [n] float32; |results| are at most the sum of the block's |numbers|."""
    whole, rest = n // block * block, n % block
    edge = n // block * (block // 2 + 1)
    bins = torch.view_as_complex(spectrum.view(-1, 2))
    parts = [spectrum.new_zeros(0)]
    if whole:
        parts.append(torch.fft.irfft(bins[:edge].view(-1, block // 2 + 1), block, norm="forward").view(-1))
    if rest:
        scale = float(np.float32((block / rest) ** 0.5))
        parts.append(torch.fft.irfft(bins[edge:], rest, norm="forward") * scale)
    return parts[-1] if len(parts) <= 2 else torch.cat(parts)


def magnitudes(pairs: Array) -> Array:
    """Real and imaginary parts in turns [2m] -> magnitudes [m] float32, by float64, in which no square overflows."""
    return pairs.view(-1, 2).double().square().sum(1).sqrt().to(torch.float32)


def pair_places(index: Array) -> Array:
    """Of each i, 2·i and 2·i + 1 [2k] int64: where its pair lies among numbers in turns."""
    return (2 * index.long()[:, None] + torch.arange(2, device=index.device)).view(-1)


def scaled(x: Array, factor: float, limit: float = _MAX) -> Array:
    """factor·x, held within ±limit; a fresh array."""
    return (x * float(np.float32(factor))).clamp_(-float(np.float32(limit)), float(np.float32(limit)))
