"""Verbs of the TensorFlow backend for matrices; ``_numpy_matrix.py`` says what each one does.

Products and principal components differ from the reference's by rounding; the rest adds in the same order, each
product and each sum in a kernel of its own, so that none is fused with the next and rounded once where the reference
rounds twice. Nothing here waits for the device, but for what ``tf.linalg.svd`` does inside.
"""

from __future__ import annotations

import tensorflow as tf

from hvdcompress.method import Array
from hvdcompress.ops import _tensorflow_base as base
from hvdcompress.ops._numpy_matrix import NEGLIGIBLE

__all__ = ["combine", "matmul", "matmul_transposed", "orthonormalise", "outer_sum", "permute", "principal"]


def _matrix(x: Array, rows: int) -> Array:
    x = base.tensor(x)
    return tf.reshape(x, [rows, len(x) // max(rows, 1)])


def permute(x: Array, shape: tuple[int, ...], axes: tuple[int, ...]) -> Array:
    """x [n], read as an array of ``shape``, with its axes in another order [n]."""
    return tf.reshape(tf.transpose(tf.reshape(base.tensor(x), shape), axes), [-1])


def matmul(a: Array, b: Array, rows: int, columns: int) -> Array:
    """a [rows × m] · b [m × columns] -> [rows · columns] float32."""
    return tf.reshape(tf.matmul(_matrix(a, rows), _matrix(b, len(b) // max(columns, 1))), [-1])


def matmul_transposed(a: Array, b: Array, rows: int, columns: int) -> Array:
    """a [rows × m] · (b [columns × m])ᵀ -> [rows · columns] float32."""
    return tf.reshape(tf.matmul(_matrix(a, rows), _matrix(b, columns), transpose_b=True), [-1])


def outer_sum(p: Array, q: Array, count: int) -> Array:
    """Σ_i p_i q_iᵀ over the ``count`` rows p_i [m] and q_i [k] -> [m · k] float32, added in their order."""
    left, right = _matrix(p, count)[:, :, None], _matrix(q, count)[:, None, :]
    total = left[0] * right[0]
    for number in range(1, count):
        total = total + left[number] * right[number]
    return tf.reshape(total, [-1])


def orthonormalise(x: Array, rows: int, fill: Array | None = None) -> Array:
    """Orthonormal rows [rows × m] float32 with the span of those of x, float32 or float64: Gram-Schmidt in float64.

    A row that is zero, or depends on those before it, becomes what is left of ``fill``'s row; or zero without one.
    """
    given = tf.cast(_matrix(x, rows), tf.float64)
    spare = None if fill is None else tf.cast(_matrix(fill, rows), tf.float64)
    done = given[:0]
    for number in range(rows):
        left = _remainder(given[number], done)
        if spare is not None:
            left = tf.where(tf.reduce_any(left != 0), left, _remainder(spare[number], done))
        done = tf.concat([done, left[None]], 0)
    return tf.reshape(tf.cast(done, tf.float32), [-1])


def _remainder(row: Array, done: Array) -> Array:
    """What the orthonormal rows ``done`` leave of a row, at length 1; zeros where that is negligible."""
    row = _at_length_1(row, 0.0)
    for _ in range(2):
        row = row - tf.reduce_sum(tf.reduce_sum(done * row, 1)[:, None] * done, 0)
    return _at_length_1(row, NEGLIGIBLE)


def _at_length_1(row: Array, least: float) -> Array:
    """The row divided by its length; zeros where that is not above ``least``. The host need not know which."""
    length = tf.sqrt(tf.reduce_sum(row * row))
    return tf.where(length > least, row / length, tf.zeros_like(row))


def principal(x: Array, rows: int, least: int, most: int, dropped: float) -> tuple[Array, Array]:
    """Principal components of the rows of x [rows × m], about their mean, as combinations of these rows.

    Returns d [1] int32, the least number of components, within least … most, that leaves out a share of at
    most ``dropped`` of the variance, and combinations [most × rows] float32, of which those after d are zero.
    """
    sizes, left, _ = tf.linalg.svd(_centred(x, rows))
    beyond = tf.cumsum(tf.square(sizes), reverse=True)
    count = tf.reduce_sum(tf.cast(beyond > dropped * beyond[:1], tf.int64), keepdims=True)
    count = tf.clip_by_value(count, least, most)
    found = tf.cast(tf.transpose(left)[:most], tf.float32)
    found = tf.where(tf.range(len(found), dtype=tf.int64)[:, None] < count, found, 0.0)
    return tf.cast(count, tf.int32), tf.reshape(tf.pad(found, [[0, most - len(found)], [0, 0]]), [-1])


def combine(weights: Array, x: Array, rows: int) -> Array:
    """Combinations [count × m] float64 of the rows of x [rows × m], less their mean; ``weights`` [count × rows]."""
    centred = _centred(x, rows)
    shares = tf.cast(tf.reshape(base.tensor(weights), [-1, rows]), tf.float64)
    total = tf.zeros([len(shares), centred.shape[1]], tf.float64)
    for number in range(rows):
        total = total + shares[:, number, None] * centred[number]
    return tf.reshape(total, [-1])


def _centred(x: Array, rows: int) -> Array:
    """x [rows × m] in float64 less the mean of its rows, which are added in their order."""
    wide = tf.cast(_matrix(x, rows), tf.float64)
    total = tf.zeros_like(wide[0])
    for number in range(rows):
        total = total + wide[number]
    return wide - total / float(rows)
