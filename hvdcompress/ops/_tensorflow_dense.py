"""Verbs on TensorFlow tensors for numbers, transforms and matrices; ``_numpy_dense.py`` is their reference."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from hvdcompress.method import Array
from hvdcompress.ops import _tensorflow_base as base

__all__ = ["float_bounds", "irfft", "magnitudes", "pair_places", "range_codes", "range_values", "rfft", "scaled"]

_LARGEST = 0x7F7FFFFF  # the bits of the largest float32
_MAX = float(np.finfo(np.float32).max)


# -- range float -----------------------------------------------------------------------------------


def _signed_bits(x: Array) -> Array:
    """The bits of float32 as int64 within int32's range: on a GPU, TensorFlow computes with int32 on the host."""
    return tf.cast(tf.bitcast(base.tensor(x), tf.int32), tf.int64)


def _float(bits: Array) -> Array:
    """The inverse of :func:`_signed_bits`."""
    return tf.bitcast(tf.cast(bits, tf.int32), tf.float32)


def float_bounds(x: Array) -> Array:
    """The largest positive x and the largest magnitude of a negative one [2] float32; 0 where there is none."""
    if not len(x):
        return tf.zeros([2])
    bits = _signed_bits(x)
    top, low = tf.reduce_max(bits), tf.reduce_max(tf.where(bits < 0, bits & 0x7FFFFFFF, 0))
    return _float(tf.stack([tf.maximum(top, 0), low]))


def _range_space(bounds: Array, bits: int, shift: int) -> tuple[Array, Array, Array, Array]:
    """The bounds' bits [2], the first bin, and the number of positive and of negative codes, each [1] int64."""
    edges = tf.clip_by_value(_signed_bits(bounds), 0, _LARGEST)  # damaged ones become some finite range
    top, low = _shifted(edges[:1], shift), _shifted(edges[1:], shift)
    room = (1 << bits) - 1  # one code is zero
    # the least bin from which both sides together, and each alone, fit the room; 0 holds zero itself
    first = tf.maximum(_shifted(top + low + 3 - room, 1), tf.maximum(top, low) + 1 - room)
    first = tf.maximum(first, 1)
    return edges, first, tf.maximum(top - first + 1, 0), tf.maximum(low - first + 1, 0)


def _shifted(x: Array, places: int) -> Array:
    """x >> places."""
    return tf.bitwise.right_shift(x, tf.constant(places, x.dtype))


def range_codes(x: Array, bounds: Array, bits: int, mantissa: int) -> Array:
    """x [n] -> range-float codes [n] int32, below 2^bits, for the range of :func:`float_bounds`."""
    shift = 23 - mantissa
    _, first, positive, negative = _range_space(bounds, bits, shift)
    bits_of_x = _signed_bits(x)
    number = _shifted(bits_of_x & 0x7FFFFFFF, shift) - (first - 1)  # from 1 on for |x| ≥ eps
    below = tf.minimum(number, negative)
    codes = tf.where(bits_of_x < 0, tf.where(below > 0, positive + below, 0), tf.minimum(number, positive))
    return tf.cast(tf.maximum(codes, 0), tf.int32)


def range_values(codes: Array, bounds: Array, bits: int, mantissa: int) -> Array:
    """The middles of the codes' bins, none beyond the range [n] float32; codes that cannot be read as the nearest."""
    shift = 23 - mantissa
    edges, first, positive, negative = _range_space(bounds, bits, shift)
    codes = tf.minimum(tf.cast(base.tensor(codes), tf.int64), positive + negative)
    minus = codes > positive
    number = tf.where(minus, codes - positive, codes)
    middle = (number + (first - 1)) * (1 << shift) + (1 << (shift - 1))
    middle = tf.minimum(middle, tf.where(minus, edges[1:], edges[:1]))
    return _float(tf.where(codes == 0, 0, tf.where(minus, middle - 0x80000000, middle)))


# -- spectra ---------------------------------------------------------------------------------------


def rfft(x: Array, block: int) -> Array:
    """x [n] -> the spectra of its blocks one after another, real and imaginary parts in turns [2·bins] float32.

    The last block may be shorter; L elements have ⌊L/2⌋ + 1 bins. A spectrum is divided by √(L·block): bins of
    all blocks then compare as their energies do, and none exceeds max|x|, so that nothing overflows.
    """
    x = base.tensor(x)
    whole = len(x) // block * block
    spectra = [tf.zeros([0])]
    for part, length in ((x[:whole], block), (x[whole:], len(x) - whole)):
        if len(part):
            scale = base.f32((length * block) ** -0.5)
            bins = tf.signal.rfft(tf.reshape(part * scale, [-1, length]))
            spectra.append(tf.reshape(tf.bitcast(bins, tf.float32), [-1]))
    return spectra[-1] if len(spectra) <= 2 else tf.concat(spectra, 0)


def irfft(spectrum: Array, n: int, block: int) -> Array:
    """The inverse of :func:`rfft` [n] float32; |results| are at most the sum of the block's |numbers|."""
    whole, rest = n // block * block, n % block
    edge = n // block * (block // 2 + 1)
    bins = tf.bitcast(tf.reshape(base.tensor(spectrum), [-1, 2]), tf.complex64)
    parts = [tf.zeros([0])]
    if whole:  # TensorFlow divides by the length, which rfft's scale has done
        rows = tf.signal.irfft(tf.reshape(bins[:edge], [-1, block // 2 + 1]), [block])
        parts.append(tf.reshape(rows, [-1]) * float(block))
    if rest:
        parts.append(tf.signal.irfft(bins[edge:], [rest]) * base.f32(rest * (block / rest) ** 0.5))
    return parts[-1] if len(parts) <= 2 else tf.concat(parts, 0)


def magnitudes(pairs: Array) -> Array:
    """Real and imaginary parts in turns [2m] -> magnitudes [m] float32, by float64, in which no square overflows."""
    wide = tf.square(tf.cast(tf.reshape(base.tensor(pairs), [-1, 2]), tf.float64))
    return tf.cast(tf.sqrt(wide[:, 0] + wide[:, 1]), tf.float32)


def pair_places(index: Array) -> Array:
    """Of each i, 2·i and 2·i + 1 [2k] int64: where its pair lies among numbers in turns."""
    wide = tf.cast(base.tensor(index), tf.int64)
    return tf.reshape(wide[:, None] * 2 + tf.range(2, dtype=tf.int64), [-1])


def scaled(x: Array, factor: float, limit: float = _MAX) -> Array:
    """factor·x, held within ±limit; a fresh array."""
    return tf.clip_by_value(base.tensor(x) * base.f32(factor), -base.f32(limit), base.f32(limit))
