"""The array verbs on eager TensorFlow tensors: payload bytes equal the reference's.

No eager tensor can be changed. What verbs write in place (the ``out`` or first argument of ``accumulate``, ``blend``,
``subtract``, ``zero_where``, ``write`` and ``fill``) is therefore a :class:`Buffer`, or a ``tf.Variable``; ``zeros``
makes buffers. All other arguments may be tensors, buffers or variables, and all results but those are tensors.

No tensor passes through host memory. What the *host* must know to go on is fetched by ``_tensorflow_base.host``, and
nowhere else, where the torch verbs do: ``all_finite``, ``all_below``, ``moments``, ``max_abs``, ``count_above``,
``to_fp16``, ``head_bytes``, ``write`` (whether indices repeat, and how often), ``kth_magnitude``, ``l2_norm``; and,
inside TensorFlow, ``tf.where`` waits for the number of indices it found. TensorFlow itself keeps int32 numbers of a
GPU on the host, so what has the length of a tensor is computed in uint32 or int64 here.

TensorFlow's processor kernels take denormal numbers (below 1.2e-38) for 0 and make none. Verbs that choose, convert
or pack go by the bits, and see them; sums and products do not. That is the one difference from the reference.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from hvdcompress.method import Array, Sparse
from hvdcompress.ops import _tensorflow_base as base
from hvdcompress.ops._tensorflow_base import Buffer as Buffer
from hvdcompress.ops._tensorflow_bits import *  # noqa: F403
from hvdcompress.ops._tensorflow_codes import *  # noqa: F403
from hvdcompress.ops._tensorflow_dense import *  # noqa: F403
from hvdcompress.ops._tensorflow_matrix import *  # noqa: F403
from hvdcompress.ops._tensorflow_sparse import *  # noqa: F403
from hvdcompress.ops.numpy import FP16_MAX, index_dtype, moments_of

# -- making and viewing ---------------------------------------------------------------------------


def zeros(size: int, dtype: str, like: Array) -> Buffer:
    """A buffer of [size] zeros on the device of ``like``."""
    with base.on_device_of(like):
        return Buffer(tf.zeros([size], dtype))


def asarray(values: np.ndarray[Any, Any], like: Array) -> Array:
    """A host numpy array on the device of ``like``."""
    with base.on_device_of(like):
        return tf.constant(values)


def concat(arrays: list[Array]) -> Array:
    """The arrays one after another."""
    return base.tensor(arrays[0]) if len(arrays) == 1 else tf.concat([base.tensor(array) for array in arrays], 0)


def to_bytes(x: Array) -> Array:
    """The memory of ``x`` as uint8, little-endian."""
    return tf.reshape(tf.bitcast(base.tensor(x), tf.uint8), [-1])


def from_bytes(buffer: Array, dtype: str) -> Array:
    """uint8 memory read as ``dtype``."""
    size = tf.as_dtype(dtype).size
    return tf.bitcast(tf.reshape(base.tensor(buffer), [-1, size] if size > 1 else [-1]), dtype)


def head_bytes(buffer: Array, num_bytes: int) -> bytes:
    """The first bytes, on the host (headers only)."""
    return bytes(base.host(buffer[:num_bytes]))


# -- residuals ------------------------------------------------------------------------------------


def accumulate(gradient: Array, residual: Array, scale: float, out: Any) -> None:
    """out = scale·gradient + residual."""
    gradient, residual = base.tensor(gradient), base.tensor(residual)
    out.assign((gradient if scale == 1.0 else gradient * base.f32(scale)) + residual)


def accumulate_moments(gradient: Array, residual: Array, scale: float, out: Any) -> tuple[float, float]:
    """:func:`accumulate`, and mean and standard deviation of the result."""
    accumulate(gradient, residual, scale, out)
    return moments(out)


def all_finite(x: Array) -> bool:
    """Whether no element is Inf or NaN."""
    return base.host(tf.reduce_all(tf.math.is_finite(base.tensor(x))))


def blend(x: Any, residual: Array, beta: float) -> None:
    """x = beta·x + (1−beta)·residual, in place."""
    x.assign(base.tensor(x) * base.f32(beta) + base.tensor(residual) * base.f32(1.0 - beta))


def subtract(x: Any, own: Any, factor: float) -> None:
    """x −= factor·own, in place; ``own`` is dense [n] or sparse (distinct indices, or repeats of value 0).

    The order in which a device adds repeats varies, but adding ±0 changes nothing in any order.
    """
    less = base.tensor(own.values if isinstance(own, Sparse) else own)
    less = less if factor == 1.0 else less * base.f32(factor)
    here = base.tensor(x)
    x.assign(tf.tensor_scatter_nd_sub(here, _places(own.index), less) if isinstance(own, Sparse) else here - less)


def zero_where(x: Any, own: Any) -> None:
    """x = 0 where ``own``, dense [n] or sparse, is not 0; in place."""
    here = base.tensor(x)
    if isinstance(own, Sparse):
        index = tf.boolean_mask(base.tensor(own.index), base.nonzero(own.values))
        x.assign(tf.tensor_scatter_nd_update(here, _places(index), tf.zeros([len(index)], here.dtype)))
    else:
        x.assign(tf.where(base.nonzero(own), tf.zeros([], here.dtype), here))


def _places(index: Array) -> Array:
    """Indices as the scatter functions want them [m, 1]."""
    return base.tensor(index)[:, None]


# -- results --------------------------------------------------------------------------------------


def write(out: Any, total: Any, factor: float) -> None:
    """out = factor·total in out's dtype; ``total`` is dense [n] or sparse, where duplicate indices add up.

    Ranks must agree to the bit, but a device adds duplicates in an order of its own, in which float sums
    differ. So they are added in rounds, in each of which an index occurs once (and otherwise only with the
    value ±0, which changes no sum): the first occurrences, then the second ones, …, as many as there are ranks.
    That is the reference's order. The sums of distinct indices lie side by side until all are there.
    """
    if not isinstance(total, Sparse):
        total = base.tensor(total)
        if factor != 1.0:
            total = total * (factor if total.dtype == tf.float64 else base.f32(factor))
        out.assign(tf.cast(total, out.dtype))
        return
    index, values = base.tensor(total.index), tf.cast(base.tensor(total.values) * base.f32(factor), out.dtype)
    if not base.host(tf.reduce_all(index[1:] > index[:-1])):
        index, values = _summed(index, values)
    out.assign(tf.scatter_nd(index[:, None], values, tf.constant(out.shape, index.dtype)))


def _summed(index: Array, values: Array) -> tuple[Array, Array]:
    """Indices in any order, with repeats -> distinct ones, ascending, and the sums of their values, in their order."""
    order = tf.argsort(index, stable=True)
    index, values = tf.gather(index, order), tf.gather(values, order)
    begins = tf.concat([tf.ones([1], tf.bool), index[1:] != index[:-1]], 0)
    starts = base.where(begins)
    group = tf.cumsum(tf.cast(begins, tf.int64)) - 1  # which of the distinct indices each one is
    counts = tf.cast(values != 0, tf.int64)
    before = tf.cumsum(counts, exclusive=True)  # non-zero values before this one, of any index
    turn = (before - tf.gather(tf.gather(before, starts), group)) * counts  # the same, of this index only
    order = tf.argsort(turn, stable=True)
    sums, start = tf.zeros([len(starts)], values.dtype), 0
    for size in base.host(tf.math.bincount(tf.cast(turn, tf.int32))):
        now = order[start : start + size]
        sums = tf.tensor_scatter_nd_add(sums, tf.gather(group, now)[:, None], tf.gather(values, now))
        start += size
    return tf.gather(index, starts), sums


def fill(out: Any, value: float) -> None:
    """out = value everywhere."""
    out.assign(tf.fill(out.shape, tf.constant(value, out.dtype)))


# -- selection ------------------------------------------------------------------------------------


def _indices(condition: Array) -> Array:
    """Indices of what is true, ascending, in the dtype for this many elements."""
    return tf.cast(base.where(condition), index_dtype(len(condition)))


def take(x: Array, index: Array) -> Array:
    """x[index] [k]."""
    return tf.gather(base.tensor(x), base.tensor(index))


def top_k(x: Array, k: int) -> Array:
    """Indices of the k largest |x|, ascending [k] int32; among equals the lowest index, as TensorFlow documents."""
    if k >= len(x):
        return index_range(len(x), x)
    found = tf.math.top_k(base.magnitudes(x), k, sorted=False, index_type=tf.as_dtype(index_dtype(len(x))))
    return tf.sort(found.indices)


def chunk_argmax(x: Array, chunk: int) -> Array:
    """Offset of the largest |x| in each chunk [ceil(n/chunk)] int32; the last chunk may be ragged."""
    chunk = max(1, min(chunk, len(x)))
    magnitude = base.rows(base.magnitudes(x), chunk)  # what fills the last row follows elements that are as large
    largest = tf.reduce_max(magnitude, 1, keepdims=True)
    places = tf.cast(tf.range(chunk), tf.uint32)
    # tf.argmax does not say which of equal ones it finds
    return tf.cast(tf.reduce_min(tf.where(magnitude == largest, places, base.word(chunk)), 1), tf.int32)


def moments(x: Array) -> tuple[float, float]:
    """Mean and unbiased standard deviation, accumulated in float64 (0 for a single element)."""
    wide = tf.cast(base.tensor(x), tf.float64)
    total, squares = base.host(tf.stack([tf.reduce_sum(wide), tf.reduce_sum(tf.square(wide))]))
    return moments_of(total, squares, len(wide))


def max_abs(x: Array) -> float:
    """The largest |x| (0 for an empty array)."""
    return float(np.uint32(base.host(tf.reduce_max(base.magnitudes(x)))).view(np.float32)) if len(x) else 0.0


def _level(threshold: float) -> int:
    """The bits of a threshold, which magnitudes are compared with; −1 for one below 0."""
    return int((np.float32(threshold) + np.float32(0)).view(np.int32)) if threshold >= 0 else -1


def _above(x: Array, threshold: float) -> Array:
    """Whether |x| > threshold."""
    level = _level(threshold)
    return base.magnitudes(x) > level if level >= 0 else tf.ones([len(x)], tf.bool)


def count_above(x: Array, threshold: float) -> int:
    """How many |x| are greater than the threshold (a float32 number)."""
    return base.host(tf.reduce_sum(tf.cast(_above(x, threshold), tf.int64)))


def first_above(x: Array, threshold: float, capacity: int) -> Array:
    """Indices of the first ``capacity`` elements with |x| > threshold, ascending int32."""
    return _indices(_above(x, threshold))[:capacity]


def first_equal(x: Array, threshold: float, capacity: int) -> Array:
    """Indices of the first ``capacity`` elements with |x| = threshold, ascending int32."""
    level = _level(threshold)
    return _indices(base.magnitudes(x) == level if level >= 0 else tf.zeros([len(x)], tf.bool))[:capacity]


def sort(x: Array) -> Array:
    """Ascending."""
    return tf.sort(base.tensor(x))


# -- numbers --------------------------------------------------------------------------------------


def index_range(n: int, like: Array) -> Array:
    """0, 1, …, n−1; in the dtype of ``like`` if that is an index dtype, as TensorFlow does not mix them."""
    dtype = like.dtype if like.dtype in (tf.int32, tf.int64) else tf.as_dtype(index_dtype(n))
    with base.on_device_of(like):
        return tf.range(n, dtype=dtype)


def all_below(index: Array, n: int) -> bool:
    """Whether every index lies in [0, n)."""
    wide = tf.cast(base.tensor(index), tf.int64)
    return base.host(tf.reduce_all((wide >= 0) & (wide < n)))


def chunk_positions(offset: Array, chunk: int, n: int) -> Array:
    """Offsets within chunks -> positions in a tensor of n elements, clipped into it [k]."""
    start = tf.range(len(offset), dtype=tf.int64) * chunk
    return tf.cast(tf.minimum(start + tf.cast(base.tensor(offset), tf.int64), n - 1), index_dtype(n))


def to_fp16(x: Array, scale: float, limit: float = FP16_MAX) -> tuple[Array, int]:
    """scale·x as float16, held within ±limit, and how many values that changed."""
    scaled, limit = base.tensor(x) * base.f32(scale), base.f32(limit)
    saturated = base.host(tf.reduce_sum(tf.cast(tf.abs(scaled) > limit, tf.int64)))
    return tf.cast(tf.clip_by_value(scaled, -limit, limit), tf.float16), saturated


def from_fp16(x: Array, scale: float) -> Array:
    """scale·x as float32, where an Inf (a sum that rounded up past the limit) reads as the largest float16."""
    return tf.clip_by_value(tf.cast(base.tensor(x), tf.float32), -FP16_MAX, FP16_MAX) * base.f32(scale)


def to_bf16(x: Array) -> Array:
    """The 16 bits of bfloat16 as uint16, rounded to nearest even; finite stays finite."""
    bits = base.bits(x)
    high = tf.bitwise.right_shift(bits, base.word(16))
    rounded = tf.bitwise.right_shift(bits + ((high & 1) + 0x7FFF), base.word(16))
    return tf.cast(tf.where((rounded & 0x7FFF) >= 0x7F80, (high & 0x8000) | 0x7F7F, rounded), tf.uint16)


def from_bf16(bits: Array) -> Array:
    """bfloat16 bits (uint16) -> float32, exactly."""
    wide = tf.cast(base.tensor(bits), tf.uint32)
    return tf.bitcast(tf.bitwise.left_shift(wide, base.word(16)), tf.float32)


def add_all(arrays: list[Array]) -> Array:
    """The sum of equal-shaped arrays, in their order."""
    total = base.tensor(arrays[0])
    for array in arrays[1:]:
        total = total + base.tensor(array)
    return total
