"""The reference verbs, of which those that a benchmark earned it are compiled (``docs/ops-benchmark.md``).

Kernels exist for float32 in plain memory; everything else goes to the reference. Results are the
reference's to the bit, but for sums in float64 (:func:`moments`), which agree to about 1e-14.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from hvdcompress.method import Sparse
from hvdcompress.ops import _kernels as kernels
from hvdcompress.ops import _kernels_codes, _numpy_codes, _numpy_dense, _numpy_matrix, _numpy_sparse
from hvdcompress.ops import numpy as reference
from hvdcompress.ops._numpy_codes import *  # noqa: F403
from hvdcompress.ops._numpy_dense import *  # noqa: F403
from hvdcompress.ops._numpy_matrix import *  # noqa: F403
from hvdcompress.ops._numpy_sparse import *  # noqa: F403
from hvdcompress.ops.numpy import (
    FP16_MAX,
    Array,
    add_all,
    all_below,
    asarray,
    concat,
    fill,
    from_bytes,
    head_bytes,
    index_dtype,
    index_range,
    moments_of,
    sort,
    take,
    to_bytes,
    zero_where,
    zeros,
)

__all__ = [
    "FP16_MAX", "Array", "accumulate", "accumulate_moments", "add_all", "all_below", "all_finite", "asarray", "blend",
    "chunk_argmax", "chunk_positions", "concat", "count_above", "fill", "find_bits",
    "first_above", "first_equal", "from_bf16", "from_bytes", "from_fp16", "head_bytes", "index_dtype", "index_range",
    "max_abs", "moments", "moments_of", "pack_bits", "set_bits", "sort", "subtract", "take", "to_bf16",
    "to_bytes", "to_fp16", "top_k", "unpack_bits", "write", "zero_where", "zeros",
]  # fmt: skip
__all__ += _numpy_codes.__all__ + _numpy_dense.__all__ + _numpy_matrix.__all__ + _numpy_sparse.__all__

_INF = 0x7F800000  # the bits of infinity; NaNs lie above


def _plain(*arrays: Array, dtype: Any = np.float32) -> bool:
    """Whether the kernels can have them: of this type and one length, contiguous, aligned, writable.

    Each kernel is so compiled only once. Lengths that differ are an error, which the reference then raises.
    """
    size = arrays[0].size
    return all(array.dtype == dtype and array.size == size and array.flags.carray for array in arrays)


def _plain_sparse(x: Array, y: Any) -> bool:
    return isinstance(y, Sparse) and _plain(x) and _plain(y.values) and y.index.size == y.values.size


def _int64(index: Array) -> Array:
    return np.ascontiguousarray(index, np.int64)


# -- residuals ------------------------------------------------------------------------------------


def accumulate(gradient: Array, residual: Array, scale: float, out: Array) -> None:
    """out = scale·gradient + residual."""
    if scale == 1.0 or not _plain(gradient, residual, out):  # numpy adds as fast as memory goes
        return reference.accumulate(gradient, residual, scale, out)
    return kernels.accumulate(gradient, residual, np.float32(scale), out)


def accumulate_moments(gradient: Array, residual: Array, scale: float, out: Array) -> tuple[float, float]:
    """:func:`accumulate`, and mean and standard deviation of the result, in one pass."""
    if not _plain(gradient, residual, out):
        return reference.accumulate_moments(gradient, residual, scale, out)
    total, squares = np.zeros(kernels.LANES), np.zeros(kernels.LANES)
    kernels.accumulate_moments(gradient, residual, np.float32(scale), out, total, squares)
    return moments_of(total.sum(), squares.sum(), out.size)


def moments(x: Array) -> tuple[float, float]:
    """Mean and unbiased standard deviation, accumulated in float64 (0 for a single element)."""
    if not _plain(x):
        return reference.moments(x)
    total, squares = np.zeros(kernels.LANES), np.zeros(kernels.LANES)
    kernels.moments(x, total, squares)
    return moments_of(total.sum(), squares.sum(), x.size)


def all_finite(x: Array) -> bool:
    """Whether no element is Inf or NaN."""
    return int(kernels.largest(x.view(np.int32))) < _INF if _plain(x) else reference.all_finite(x)


def blend(x: Array, residual: Array, beta: float) -> None:
    """x = beta·x + (1−beta)·residual, in place."""
    if not _plain(x, residual):
        return reference.blend(x, residual, beta)
    return kernels.blend(x, residual, np.float32(beta), np.float32(1.0 - beta))


def subtract(x: Array, own: Any, factor: float) -> None:
    """x −= factor·own, in place; ``own`` is dense [n] or sparse (distinct indices, or repeats of value 0)."""
    if _plain_sparse(x, own):
        kernels.add_at(x, _int64(own.index), own.values, -np.float32(factor))  # x − v and x + (−v) are the same float
    elif not isinstance(own, Sparse) and factor != 1.0 and _plain(x, own):
        kernels.subtract(x, own, np.float32(factor))
    else:
        reference.subtract(x, own, factor)


# -- results --------------------------------------------------------------------------------------


def write(out: Array, total: Any, factor: float) -> None:
    """out = factor·total in out's dtype; ``total`` is dense [n] or sparse, where duplicate indices add up."""
    if _plain_sparse(out, total):
        ctypes.memset(out.ctypes.data, 0, out.nbytes)  # 2/3 of fill's time: it need not read what it overwrites
        kernels.add_at(out, _int64(total.index), total.values, np.float32(factor))
    else:
        reference.write(out, total, factor)


# -- selection ------------------------------------------------------------------------------------


def _bits(threshold: float) -> np.int32:
    return (np.float32(threshold) + np.float32(0.0)).view(np.int32)  # + 0: no −0


def _indices(x: Array, low: int, high: int, capacity: int) -> Array:
    """The first ``capacity`` indices of magnitudes with bits in [low, high], ascending."""
    out = np.empty(min(capacity, x.size), index_dtype(x.size))
    return out[: kernels.find(x.view(np.int32), np.int32(low), np.uint32(high - low), out)]


def top_k(x: Array, k: int) -> Array:
    """Indices of the k largest |x|, ascending [k] int32; among equals the lowest index.

    A histogram of a sample tells a magnitude that more than k elements reach; the reference then chooses
    among those. If the sample misled, the histogram of all elements tells it for certain.
    """
    n = x.size
    if not _plain(x) or not 0 < k < n:
        return reference.top_k(x, k)
    for stride in (n >> 16 | 1, 1):  # odd: not in step with the rows of a matrix
        count = kernels.histogram(x.view(np.int32), stride)[::-1].cumsum()
        bucket = int(np.searchsorted(count, k if stride == 1 else min(1.2 * k / stride + 30, count[-1])))
        capacity = int(count[bucket]) * (1 if stride == 1 else 2 * stride) + 1  # one more: full is too many
        candidates = _indices(x, (2047 - bucket) << 20, 0x7FFFFFFF, capacity)
        if k <= candidates.size < capacity:
            break
    return candidates[reference.top_k(x[candidates], k)]


def chunk_argmax(x: Array, chunk: int) -> Array:
    """Offset of the largest |x| in each chunk [ceil(n/chunk)] int32; the last chunk may be ragged."""
    if not _plain(x):
        return reference.chunk_argmax(x, chunk)
    offset = np.empty(-(-x.size // chunk), np.int32)
    kernels.chunk_argmax(x.view(np.int32), chunk, offset)
    return offset


def max_abs(x: Array) -> float:
    """The largest |x| (0 for an empty array)."""
    return float(np.int32(kernels.largest(x.view(np.int32))).view(np.float32)) if _plain(x) else reference.max_abs(x)


def count_above(x: Array, threshold: float) -> int:
    """How many |x| are greater than the threshold (a float32 number)."""
    if not _plain(x) or threshold < 0:
        return reference.count_above(x, threshold)
    return int(kernels.count(x.view(np.int32), np.int32(_bits(threshold) + 1)))


def first_above(x: Array, threshold: float, capacity: int) -> Array:
    """Indices of the first ``capacity`` elements with |x| > threshold, ascending int32."""
    if not _plain(x) or threshold < 0:
        return reference.first_above(x, threshold, capacity)
    return _indices(x, int(_bits(threshold)) + 1, 0x7FFFFFFF, capacity)


def first_equal(x: Array, threshold: float, capacity: int) -> Array:
    """Indices of the first ``capacity`` elements with |x| = threshold, ascending int32."""
    if not _plain(x) or threshold < 0:
        return reference.first_equal(x, threshold, capacity)
    return _indices(x, int(_bits(threshold)), int(_bits(threshold)), capacity)


# -- numbers --------------------------------------------------------------------------------------


def chunk_positions(offset: Array, chunk: int, n: int) -> Array:
    """Offsets within chunks -> positions in a tensor of n elements, clipped into it [k]."""
    positions = np.empty(offset.size, index_dtype(n))
    kernels.chunk_positions(_int64(offset), chunk, n - 1, positions)
    return positions


def to_fp16(x: Array, scale: float, limit: float = FP16_MAX) -> tuple[Array, int]:
    """scale·x as float16, held within ±limit, and how many values that changed."""
    if not _plain(x) or not 0 < limit <= FP16_MAX:
        return reference.to_fp16(x, scale, limit)
    out = np.empty(x.size, np.float16)
    return out, int(kernels.to_fp16(x, np.float32(scale), np.float32(limit), out.view(np.uint16)))


def from_fp16(x: Array, scale: float) -> Array:
    """scale·x as float32, where an Inf (a sum that rounded up past the limit) reads as the largest float16."""
    if not _plain(x, dtype=np.float16):
        return reference.from_fp16(x, scale)
    out = np.empty(x.size, np.float32)
    kernels.from_fp16(x.view(np.uint16), np.float32(scale), out, out.view(np.uint32))
    return out


def to_bf16(x: Array) -> Array:
    """The 16 bits of bfloat16 as uint16, rounded to nearest even; finite stays finite."""
    if not _plain(x):
        return reference.to_bf16(x)
    out = np.empty(x.size, np.uint16)
    kernels.to_bf16(x.view(np.uint32), out)
    return out


def from_bf16(bits: Array) -> Array:
    """bfloat16 bits (uint16) -> float32, exactly."""
    if not _plain(bits, dtype=np.uint16):
        return reference.from_bf16(bits)
    out = np.empty(bits.size, np.float32)
    kernels.from_bf16(bits, out.view(np.uint32))
    return out


# -- bits -----------------------------------------------------------------------------------------


def pack_bits(values: Array, width: int) -> Array:
    """Unsigned numbers of ``width`` bits each, lowest bit first, packed without gaps into uint8."""
    if not 0 < width <= 56:
        return reference.pack_bits(values, width)
    out = np.empty(-(-values.size * width // 8), np.uint8)
    kernels.pack_bits(_int64(values), width, out)
    return out


def unpack_bits(buffer: Array, width: int, count: int) -> Array:
    """The inverse of :func:`pack_bits` [count] int64."""
    if not 0 < width <= 56 or not _plain(buffer, dtype=np.uint8):
        return reference.unpack_bits(buffer, width, count)
    out = np.empty(count, np.int64)
    kernels.unpack_bits(buffer, width, out)
    return out


def set_bits(positions: Array, num_bits: int) -> Array:
    """A bitmap of ``num_bits`` with these (distinct) positions set, packed into uint8."""
    out = np.zeros(-(-num_bits // 8), np.uint8)
    kernels.set_bits(_int64(positions), num_bits, out)
    return out


def find_bits(buffer: Array, num_bits: int) -> Array:
    """The positions of the set bits, ascending int64."""
    if not _plain(buffer, dtype=np.uint8):
        return reference.find_bits(buffer, num_bits)
    return kernels.find_bits(buffer[: -(-num_bits // 8)], num_bits)


# -- coarse codes ---------------------------------------------------------------------------------


def bucket_norms(x: Array, bucket: int, norm: _numpy_codes.Norm) -> Array:  # type: ignore[no-redef]
    """The norms of each ``bucket`` elements [ceil(n/bucket)]; the last bucket may be shorter."""
    if not x.size or not _plain(x):
        return reference.bucket_norms(x, bucket, norm)
    bucket = min(bucket, x.size)
    out = np.empty(-(-x.size // bucket), np.float32)
    if norm == "max":
        _kernels_codes.bucket_max(x.view(np.int32), bucket, out.view(np.int32))
        return out
    sums = np.zeros((out.size, -(-bucket // _numpy_codes.PIECE)))
    _kernels_codes.piece_sums(x, bucket, norm == "l2", sums)
    return _numpy_codes.norms_of(_numpy_codes.fold(sums), x.size, bucket, norm)


def quantize(x: Array, norms: Array, bucket: int, bits: int, key: Array) -> Array:  # type: ignore[no-redef]
    """x [n] -> a random one of the two nearest levels and a sign each, packed [ceil(n·bits/8)] uint8."""
    if not _plain(x) or norms.size * bucket < x.size:
        return reference.quantize(x, norms, bucket, bits, key)
    out, safe = np.empty(-(-x.size * bits // 8), np.uint8), np.where(norms > 0, norms, np.float32(1))
    _kernels_codes.quantize(x, x.view(np.uint32), safe, bucket, bits, key[0], out)
    return out


def dequantize(buffer: Array, norms: Array, bucket: int, bits: int, count: int) -> Array:  # type: ignore[no-redef]
    """The inverse of :func:`quantize` [count] float32."""
    if not _plain(buffer, dtype=np.uint8) or norms.size * bucket < count:
        return reference.dequantize(buffer, norms, bucket, bits, count)
    out = np.empty(count, np.float32)
    safe = np.clip(norms.view(np.int32), 0, _numpy_codes.LARGEST).view(np.float32)
    _kernels_codes.dequantize(buffer, safe, bucket, bits, _numpy_codes.level_values(bits), out)
    return out
