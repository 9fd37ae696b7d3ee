"""Verbs of the reference for numbers, transforms and matrices: range float, FFT.

Arrays are flat, float32 where nothing else is said. ``numpy.py`` hands these verbs on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.fft

Array = np.ndarray[Any, Any]

__all__ = ["float_bounds", "irfft", "magnitudes", "pair_places", "range_codes", "range_values", "rfft", "scaled"]

_LARGEST = 0x7F7FFFFF  # the bits of the largest float32
_MAX = float(np.finfo(np.float32).max)


# -- range float -----------------------------------------------------------------------------------


def float_bounds(x: Array) -> Array:
    """The largest positive x and the largest magnitude of a negative one [2] float32; 0 where there is none."""
    return np.array([x.max(initial=0), -x.min(initial=0)], np.float32) + np.float32(0)  # -0 becomes 0


def _range_space(bounds: Array, bits: int, shift: int) -> tuple[Array, Array, Array, Array]:
    """The bounds' bits [2], the first bin, and the number of positive and of negative codes, each [1] int32."""
    edges = np.clip(bounds.view(np.int32), 0, _LARGEST)  # damaged ones become some finite range
    top, low = edges[:1] >> shift, edges[1:] >> shift
    room = (1 << bits) - 1  # one code is zero
    # the least bin from which both sides together, and each alone, fit the room; 0 holds zero itself
    first = np.maximum(np.maximum((top + low + 3 - room) >> 1, np.maximum(top, low) + 1 - room), 1)
    return edges, first, np.maximum(top - first + 1, 0), np.maximum(low - first + 1, 0)


def range_codes(x: Array, bounds: Array, bits: int, mantissa: int) -> Array:
    """x [n] -> range-float codes [n] int32, below 2^bits, for the range of :func:`float_bounds`."""
    shift = 23 - mantissa
    _, first, positive, negative = _range_space(bounds, bits, shift)
    bits_of_x = np.ascontiguousarray(x).view(np.int32)
    number = ((bits_of_x & 0x7FFFFFFF) >> shift) - (first - 1)  # from 1 on for |x| ≥ eps
    below = np.minimum(number, negative)
    codes = np.where(bits_of_x < 0, np.where(below > 0, positive + below, 0), np.minimum(number, positive))
    return np.maximum(codes, 0)


def range_values(codes: Array, bounds: Array, bits: int, mantissa: int) -> Array:
    """The middles of the codes' bins, none beyond the range [n] float32; codes that cannot be read as the nearest."""
    shift = 23 - mantissa
    edges, first, positive, negative = _range_space(bounds, bits, shift)
    codes = np.minimum(codes.astype(np.int32), positive + negative)
    minus = codes > positive
    number = np.where(minus, codes - positive, codes)
    middle = ((number + (first - 1)) << shift) + (1 << (shift - 1))
    middle = np.minimum(middle, np.where(minus, edges[1:], edges[:1]))
    return np.where(codes == 0, 0, np.where(minus, middle | -0x80000000, middle)).astype(np.int32).view(np.float32)


# -- spectra ---------------------------------------------------------------------------------------


def rfft(x: Array, block: int) -> Array:
    """x [n] -> the spectra of its blocks one after another, real and imaginary parts in turns [2·bins] float32.

    The last block may be shorter; L elements have ⌊L/2⌋ + 1 bins. A spectrum is divided by √(L·block): bins of
    all blocks then compare as their energies do, and none exceeds max|x|, so that nothing overflows.
    """
    whole = x.size // block * block
    spectra = [np.zeros(0, np.complex64)]
    for part in (x[:whole].reshape(-1, block), x[whole:].reshape(1, -1)):
        if part.size:
            scale = np.float32((part.shape[1] * block) ** -0.5)
            spectra.append(scipy.fft.rfft(part * scale, overwrite_x=True).ravel())
    return (spectra[-1] if len(spectra) <= 2 else np.concatenate(spectra)).view(np.float32)


def irfft(spectrum: Array, n: int, block: int) -> Array:
    """The inverse of :func:`rfft` [n] float32; |results| are at most the sum of the block's |numbers|."""
    whole, rest = n // block * block, n % block
    edge = n // block * (block // 2 + 1)
    bins = spectrum.view(np.complex64)
    parts = [np.zeros(0, np.float32)]
    if whole:
        parts.append(scipy.fft.irfft(bins[:edge].reshape(-1, block // 2 + 1), block, norm="forward").ravel())
    if rest:
        parts.append(scipy.fft.irfft(bins[edge:], rest, norm="forward") * np.float32((block / rest) ** 0.5))
    return parts[-1] if len(parts) <= 2 else np.concatenate(parts)


def magnitudes(pairs: Array) -> Array:
    """Real and imaginary parts in turns [2m] -> magnitudes [m] float32, by float64, in which no square overflows."""
    out = np.empty(pairs.size // 2, np.float32)
    for start in range(0, out.size, 1 << 14):  # what fits the processor's cache
        squares = np.square(pairs[2 * start : 2 * (start + (1 << 14))], dtype=np.float64)
        np.sqrt(squares[::2] + squares[1::2], out=out[start : start + (1 << 14)], casting="same_kind")
    return out


def pair_places(index: Array) -> Array:
    """Of each i, 2·i and 2·i + 1 [2k] int64: where its pair lies among numbers in turns."""
    return (2 * index.astype(np.int64)[:, None] + np.arange(2)).ravel()


def scaled(x: Array, factor: float, limit: float = _MAX) -> Array:
    """factor·x, held within ±limit; a fresh array."""
    with np.errstate(over="ignore"):
        out = x * np.float32(factor)
    return np.clip(out, -np.float32(limit), np.float32(limit), out=out)
