"""The TensorFlow verbs that pack numbers and bitmaps: words of 64 bits first, of which whole bytes are taken."""

from __future__ import annotations

import math

import tensorflow as tf

from hvdcompress.method import Array
from hvdcompress.ops import _tensorflow_base as base

__all__ = ["find_bits", "pack_bits", "set_bits", "unpack_bits"]


def _per_word(width: int) -> int:
    """How many numbers of ``width`` bits fill whole bytes of a 64-bit word; 0 where none do."""
    least = 8 // math.gcd(width, 8)
    return 64 // (least * width) * least


def pack_bits(values: Array, width: int) -> Array:
    """Unsigned numbers of ``width`` bits each, lowest bit first, packed without gaps into uint8."""
    if width == 0:
        return tf.zeros([0], tf.uint8)
    values = tf.cast(base.tensor(values), tf.int64)
    num_bytes = -(-len(values) * width // 8)
    if not _per_word(width):
        single = tf.bitwise.right_shift(values[:, None], tf.range(width, dtype=tf.int64)) & 1
        values, width = tf.reshape(single, [-1]), 1
    per = _per_word(width)
    places = tf.range(0, per * width, width, dtype=tf.int64)
    words = tf.reduce_sum(tf.bitwise.left_shift(base.rows(values, per), places), 1)  # no two share a bit
    return tf.reshape(tf.bitcast(words, tf.uint8)[:, : per * width // 8], [-1])[:num_bytes]


def unpack_bits(buffer: Array, width: int, count: int) -> Array:
    """The inverse of :func:`pack_bits` [count] int64."""
    if width == 0:
        return tf.zeros([count], tf.int64)
    per = _per_word(width)
    if not per:
        single = tf.reshape(unpack_bits(buffer, 1, count * width), [count, width])
        return tf.reduce_sum(tf.bitwise.left_shift(single, tf.range(width, dtype=tf.int64)), 1)
    num_bytes = per * width // 8
    words = -(-count // per)
    buffer = base.tensor(buffer)[: words * num_bytes]
    buffer = tf.reshape(tf.pad(buffer, [[0, words * num_bytes - len(buffer)]]), [words, num_bytes])
    wide = tf.bitcast(tf.pad(buffer, [[0, 0], [0, 8 - num_bytes]]), tf.int64)
    places = tf.range(0, per * width, width, dtype=tf.int64)
    numbers = tf.bitwise.right_shift(wide[:, None], places)
    return tf.reshape(numbers if width == 64 else numbers & ((1 << width) - 1), [-1])[:count]


def set_bits(positions: Array, num_bits: int) -> Array:
    """A bitmap of ``num_bits`` with these (distinct) positions set, packed into uint8."""
    places = tf.cast(base.tensor(positions), tf.int64)[:, None]
    bits = tf.scatter_nd(places, tf.ones([len(places)], tf.uint8), tf.constant([num_bits], tf.int64))
    return pack_bits(bits, 1)


def find_bits(buffer: Array, num_bits: int) -> Array:
    """The positions of the set bits, ascending int64."""
    return base.where(unpack_bits(buffer, 1, num_bits) != 0)
