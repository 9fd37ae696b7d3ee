"""The TensorFlow verbs for sparse vectors and for thresholds; ``_numpy_sparse.py`` is their reference."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from hvdcompress.method import Array, Sparse
from hvdcompress.ops import _tensorflow_base as base

__all__ = ["kth_magnitude", "l2_norm", "merge"]


def merge(a: Sparse, b: Sparse, n: int) -> Sparse:
    """a + b: distinct ascending indices below n, and values [m] float32; each of a and b has distinct indices.

    No place gets more than two values, and a sum of two is the same in either order: no device can differ.
    """
    index = tf.concat([tf.cast(base.tensor(part.index), tf.int64) for part in (a, b)], 0)
    values = tf.concat([base.tensor(part.values) for part in (a, b)], 0)
    order = tf.argsort(index, stable=True)
    index, values = tf.gather(index, order), tf.gather(values, order)
    begins = tf.concat([tf.ones([1], tf.bool), index[1:] != index[:-1]], 0)[: len(index)]
    starts = base.where(begins)
    group = tf.cumsum(tf.cast(begins, tf.int64)) - 1
    sums = tf.tensor_scatter_nd_add(tf.zeros([len(starts)]), group[:, None], values)
    return Sparse(tf.cast(tf.gather(index, starts), "int32" if n < 2**31 else "int64"), sums)


def kth_magnitude(x: Array, k: int) -> float:
    """The k-th largest |x|, 1 ≤ k ≤ n (0 for an empty array)."""
    if not len(x):
        return 0.0
    found = tf.math.top_k(base.magnitudes(x), k, sorted=False)
    return float(np.uint32(base.host(tf.reduce_min(found.values))).view(np.float32))


def l2_norm(x: Array) -> float:
    """‖x‖ of float32, summed in float64, in which no float32's square overflows or vanishes."""
    return base.host(tf.sqrt(tf.reduce_sum(tf.square(tf.cast(base.tensor(x), tf.float64)))))
