"""Verbs on TensorFlow tensors for coarse codes; ``_numpy_codes.py`` is their reference."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from hvdcompress.method import Array
from hvdcompress.ops import _tensorflow_base as base
from hvdcompress.ops._numpy_codes import LARGEST, PIECE, Norm, level_values
from hvdcompress.ops._tensorflow_bits import pack_bits, unpack_bits

__all__ = [
    "bucket_norms", "dequantize", "pack_fields", "pack_signs", "quantize", "uniform", "unpack_fields", "unpack_signs",
]  # fmt: skip

_MAX = float(np.finfo(np.float32).max)


# -- random numbers --------------------------------------------------------------------------------


def _xor_shifted(x: Array, places: int) -> Array:
    """x ^ x >> places, of uint32."""
    return tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, base.word(places)))


def _mix(x: Array) -> Array:
    """The reference's hash of uint32."""
    x = _xor_shifted(x, 16) * base.word(0x85EBCA6B)
    x = _xor_shifted(x, 13) * base.word(0xC2B2AE35)
    return _xor_shifted(x, 16)


def uniform(key: np.ndarray, count: int, like: Array, start: int = 0) -> Array:
    """Numbers ``start``, ``start`` + 1, … of the stream of a key ([1] uint32, on the host) [count] float32.

    They are multiples of 2^-24 in [0, 1), made on the device of ``like``.
    """
    with base.on_device_of(like):
        index = tf.cast(tf.range(start, start + count, dtype=tf.int64), tf.uint32)
        word = base.word(int(key[0]))
        bits = _mix(tf.bitwise.bitwise_xor(_mix(index + word), word))
        return tf.cast(tf.bitwise.right_shift(bits, base.word(8)), tf.float32) * 2.0**-24


# -- norms of buckets ------------------------------------------------------------------------------


def _fold(rows: Array) -> Array:
    """The sums of rows [m, w] float64 of no negative numbers -> [m], added in the reference's order."""
    count, width = rows.shape
    if width > PIECE:
        pieces = -(-width // PIECE)
        rows = tf.pad(rows, [[0, 0], [0, pieces * PIECE - width]])
        return _fold(tf.reshape(_fold(tf.reshape(rows, [count * pieces, PIECE])), [count, pieces]))
    while width > 1:
        half = (width + 1) // 2
        right = rows[:, half:]
        rows = rows[:, :half] + (tf.pad(right, [[0, 0], [0, 1]]) if width % 2 else right)
        width = half
    return rows[:, 0]


def bucket_norms(x: Array, bucket: int, norm: Norm) -> Array:
    """The norms of each ``bucket`` elements [ceil(n/bucket)]; the last bucket may be shorter.

    ``norm``: the largest magnitude, the l2-norm, or the mean magnitude; sums are float64.
    """
    if not len(x):
        return tf.zeros([0])
    bucket = min(bucket, len(x))
    if norm == "max":
        return tf.bitcast(tf.reduce_max(base.rows(base.magnitudes(x), bucket), 1), tf.float32)
    wide = base.rows(tf.cast(base.tensor(x), tf.float64), bucket)
    if norm == "l2":
        return tf.cast(tf.minimum(tf.sqrt(_fold(tf.square(wide))), _MAX), tf.float32)
    starts = tf.range(0, len(x), bucket, dtype=tf.int64)
    return tf.cast(_fold(tf.abs(wide)) / tf.cast(tf.minimum(len(x) - starts, bucket), tf.float64), tf.float32)


def _finite(norms: Array) -> Array:
    """Norms as they might come over the wire; those that are none are read as finite ones."""
    bits = base.bits(norms)
    return tf.bitcast(tf.where(bits > 0x7FFFFFFF, base.word(0), tf.minimum(bits, LARGEST)), tf.float32)


# -- levels ----------------------------------------------------------------------------------------


def _each(norms: Array, bucket: int, n: int) -> Array:
    """Every element's norm [n], or [1] where all have the same."""
    return norms[:1] if bucket >= n else tf.repeat(norms, bucket)[:n]


def quantize(x: Array, norms: Array, bucket: int, bits: int, key: np.ndarray) -> Array:
    """x [n] -> a sign and a level below 2^(bits − 1) each, packed, lowest bit first [ceil(n·bits/8)] uint8.

    |x|/norm·s lies between two of the levels 0 … s = 2^(bits − 1) − 1, and becomes one of them at random, with
    numbers from ``key``, so that its mean is right. The sign is a code's highest bit. |x| > norm counts as norm.
    """
    x, norms = base.tensor(x), base.tensor(norms)
    share = tf.abs(x) / _each(tf.where(norms > 0, norms, 1.0), bucket, len(x))
    share = tf.where(share < 1, share, 1.0) * float((1 << (bits - 1)) - 1)
    level = tf.floor(share)
    up = uniform(key, len(x), x) < share - level  # share − level is exact, so what lies on a level stays there
    sign = tf.bitwise.right_shift(base.bits(x), base.word(31))
    return pack_bits(tf.cast(level, tf.uint32) + tf.cast(up, tf.uint32) + sign * (1 << (bits - 1)), bits)


def dequantize(buffer: Array, norms: Array, bucket: int, bits: int, count: int) -> Array:
    """The inverse of :func:`quantize`: ±norm·level/s [count]; norms that are none are read as finite ones."""
    values = tf.gather(tf.constant(level_values(bits)), unpack_bits(buffer, bits, count))
    return values * _each(_finite(norms), bucket, count)


# -- signs -----------------------------------------------------------------------------------------


def pack_signs(x: Array) -> Array:
    """One bit an element, lowest first: whether x < 0 [ceil(n/8)] uint8."""
    return pack_bits(base.bits(x) > 0x80000000, 1)


def unpack_signs(buffer: Array, scale: Array, count: int) -> Array:
    """The inverse of :func:`pack_signs`: −scale or +scale [count], of ``scale`` [1]."""
    scale = _finite(scale)
    return tf.where(unpack_bits(buffer, 1, count) > 0, -scale, scale)


# -- fields that add -------------------------------------------------------------------------------


def pack_fields(values: Array, width: int) -> Array:
    """Whole numbers v [n] -> words of ⌊32/width⌋ of them, Σ v_j·2^(width·j) [ceil(n/⌊32/width⌋)] int32.

    Sums of words are words of the sums, while those stay within ±(2^width − 1)/2; no word then overflows.
    """
    places = tf.range(0, 32 // width * width, width, dtype=tf.int64)
    fields = base.rows(tf.cast(base.tensor(values), tf.int64), 32 // width)
    return tf.cast(tf.reduce_sum(tf.bitwise.left_shift(fields, places), 1), tf.int32)


def unpack_fields(words: Array, width: int, count: int, bound: int) -> Array:
    """The inverse of :func:`pack_fields` [count] float32, for numbers within ±bound."""
    places = range(0, 32 // width * width, width)
    raised = tf.cast(base.tensor(words), tf.int64) + sum(bound << place for place in places)
    fields = tf.bitwise.right_shift(raised[:, None], tf.constant(list(places), tf.int64)) & ((1 << width) - 1)
    return tf.cast(tf.reshape(fields, [-1])[:count] - bound, tf.float32)
