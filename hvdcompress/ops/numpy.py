"""The array verbs in numpy: the reference that every other backend is compared with.

Arrays are flat. Working values are float32 (float64 for methods that are ``wide``), indices int32
(int64 where a tensor has 2^31 elements or more), payloads uint8. Nothing here changes its inputs,
but for the verbs that say so. Where a choice is free (ties), the lowest index wins, so that
backends agree to the byte.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdcompress.method import Sparse
from hvdcompress.ops._numpy_codes import *  # noqa: F403
from hvdcompress.ops._numpy_dense import *  # noqa: F403
from hvdcompress.ops._numpy_matrix import *  # noqa: F403
from hvdcompress.ops._numpy_sparse import *  # noqa: F403

Array = np.ndarray[Any, Any]

FP16_MAX = 65504.0


# -- making and viewing ---------------------------------------------------------------------------


def zeros(size: int, dtype: str, like: Array) -> Array:
    """[size] zeros on the device of ``like``."""
    return np.zeros(size, dtype)


def asarray(values: Array, like: Array) -> Array:
    """A host numpy array on the device of ``like``."""
    return np.asarray(values)


def concat(arrays: list[Array]) -> Array:
    """The arrays one after another."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def to_bytes(x: Array) -> Array:
    """The memory of ``x`` as uint8, little-endian."""
    return np.ascontiguousarray(x).view(np.uint8)


def from_bytes(buffer: Array, dtype: str) -> Array:
    """uint8 memory read as ``dtype``; copies only where the bytes are not aligned."""
    if buffer.ctypes.data % np.dtype(dtype).itemsize:
        buffer = buffer.copy()
    return buffer.view(dtype)


def head_bytes(buffer: Array, num_bytes: int) -> bytes:
    """The first bytes, on the host (headers only)."""
    return buffer[:num_bytes].tobytes()


# -- residuals ------------------------------------------------------------------------------------


def accumulate(gradient: Array, residual: Array, scale: float, out: Array) -> None:
    """out = scale·gradient + residual."""
    if scale == 1.0:
        np.add(gradient, residual, out=out)
    else:
        np.multiply(gradient, np.float32(scale), out=out)
        out += residual


def accumulate_moments(gradient: Array, residual: Array, scale: float, out: Array) -> tuple[float, float]:
    """:func:`accumulate`, and mean and standard deviation of the result."""
    accumulate(gradient, residual, scale, out)
    return moments(out)


def all_finite(x: Array) -> bool:
    """Whether no element is Inf or NaN (a float64 sum of finite float32 cannot overflow; float64 is tested)."""
    if x.dtype == np.float64:
        return bool(np.isfinite(x).all())
    with np.errstate(invalid="ignore"):  # inf - inf: the NaN is the answer
        return bool(np.isfinite(x.sum(dtype=np.float64)))


def blend(x: Array, residual: Array, beta: float) -> None:
    """x = beta·x + (1−beta)·residual, in place."""
    x *= np.float32(beta)
    x += np.float32(1.0 - beta) * residual


def subtract(x: Array, own: Any, factor: float) -> None:
    """x −= factor·own, in place; ``own`` is dense [n] or sparse (distinct indices, or repeats of value 0)."""
    f = np.float32(factor)
    if isinstance(own, Sparse):
        np.subtract.at(x, own.index, f * own.values)
    else:
        np.subtract(x, own if f == 1 else f * own, out=x)


def zero_where(x: Array, own: Any) -> None:
    """x = 0 where ``own``, dense [n] or sparse, is not 0; in place."""
    if isinstance(own, Sparse):
        x[own.index[own.values != 0]] = 0
    else:
        x[own != 0] = 0


# -- results --------------------------------------------------------------------------------------


def write(out: Array, total: Any, factor: float) -> None:
    """out = factor·total in out's dtype; ``total`` is dense [n] or sparse, where duplicate indices add up."""
    if isinstance(total, Sparse):
        out[...] = 0
        np.add.at(out, total.index, (total.values * np.float32(factor)).astype(out.dtype, copy=False))
    elif factor == 1.0:
        out[...] = total
    else:
        np.multiply(total, total.dtype.type(factor), out=out, casting="same_kind")


def fill(out: Array, value: float) -> None:
    """out = value everywhere."""
    out[...] = value


# -- selection ------------------------------------------------------------------------------------


def take(x: Array, index: Array) -> Array:
    """x[index] [k]."""
    return x[index]


def top_k(x: Array, k: int) -> Array:
    """Indices of the k largest |x|, ascending [k] int32; among equals the lowest index."""
    if k >= x.size:
        return index_range(x.size, x)
    magnitude = np.abs(x)
    threshold = np.partition(magnitude, x.size - k)[x.size - k]
    above = np.flatnonzero(magnitude > threshold)
    ties = np.flatnonzero(magnitude == threshold)[: k - above.size]
    return np.sort(np.concatenate([above, ties])).astype(index_dtype(x.size))


def chunk_argmax(x: Array, chunk: int) -> Array:
    """Offset of the largest |x| in each chunk [ceil(n/chunk)] int32; the last chunk may be ragged."""
    whole = x.size // chunk * chunk
    offset = np.abs(x[:whole].reshape(-1, chunk)).argmax(axis=1)
    if whole < x.size:
        offset = np.append(offset, np.abs(x[whole:]).argmax())
    return offset.astype(np.int32)


def moments(x: Array) -> tuple[float, float]:
    """Mean and unbiased standard deviation, accumulated in float64 (0 for a single element)."""
    return moments_of(x.sum(dtype=np.float64), np.square(x, dtype=np.float64).sum(), x.size)


def moments_of(total: float, squares: float, n: int) -> tuple[float, float]:
    """Mean and unbiased standard deviation from Σx and Σx²."""
    mean = float(total) / max(n, 1)
    variance = float(squares) - n * mean * mean
    if variance < 1e-12 * squares:  # the rounding of the sums, and nothing else, if all elements are equal
        variance = 0.0
    return mean, (variance / max(n - 1, 1)) ** 0.5


def max_abs(x: Array) -> float:
    """The largest |x| (0 for an empty array)."""
    return float(np.abs(x).max(initial=0.0))


def count_above(x: Array, threshold: float) -> int:
    """How many |x| are greater than the threshold (a float32 number)."""
    return int(np.count_nonzero(np.abs(x) > np.float32(threshold)))


def first_above(x: Array, threshold: float, capacity: int) -> Array:
    """Indices of the first ``capacity`` elements with |x| > threshold, ascending int32."""
    index = np.flatnonzero(np.abs(x) > np.float32(threshold))[:capacity]
    return index.astype(index_dtype(x.size))


def first_equal(x: Array, threshold: float, capacity: int) -> Array:
    """Indices of the first ``capacity`` elements with |x| = threshold, ascending int32."""
    index = np.flatnonzero(np.abs(x) == np.float32(threshold))[:capacity]
    return index.astype(index_dtype(x.size))


def sort(x: Array) -> Array:
    """Ascending."""
    return np.sort(x)


# -- numbers --------------------------------------------------------------------------------------


def index_dtype(n: int) -> str:
    """int32 as long as it can hold every index below n."""
    return "int32" if n < 2**31 else "int64"


def index_range(n: int, like: Array) -> Array:
    """0, 1, …, n−1."""
    return np.arange(n, dtype=index_dtype(n))


def all_below(index: Array, n: int) -> bool:
    """Whether every index lies in [0, n)."""
    return bool((index >= 0).all() and (index < n).all())


def chunk_positions(offset: Array, chunk: int, n: int) -> Array:
    """Offsets within chunks -> positions in a tensor of n elements, clipped into it [k]."""
    start = np.arange(offset.size, dtype=np.int64) * chunk
    return np.minimum(start + offset, n - 1).astype(index_dtype(n))


def to_fp16(x: Array, scale: float, limit: float = FP16_MAX) -> tuple[Array, int]:
    """scale·x as float16, held within ±limit, and how many values that changed."""
    scaled = x * np.float32(scale)
    saturated = np.count_nonzero(np.abs(scaled) > np.float32(limit))
    return np.clip(scaled, -np.float32(limit), np.float32(limit)).astype(np.float16), int(saturated)


def from_fp16(x: Array, scale: float) -> Array:
    """scale·x as float32, where an Inf (a sum that rounded up past the limit) reads as the largest float16."""
    return np.clip(x.astype(np.float32), -FP16_MAX, FP16_MAX) * np.float32(scale)


def to_bf16(x: Array) -> Array:
    """The 16 bits of bfloat16 as uint16, rounded to nearest even; finite stays finite."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16
    rounded = np.where((rounded & 0x7FFF) >= 0x7F80, (bits >> 16) & 0x8000 | 0x7F7F, rounded)
    return rounded.astype(np.uint16)


def from_bf16(bits: Array) -> Array:
    """bfloat16 bits (uint16) -> float32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def add_all(arrays: list[Array]) -> Array:
    """The sum of equal-shaped arrays, in their order."""
    total = arrays[0].copy()
    for array in arrays[1:]:
        total += array
    return total


# -- bits -----------------------------------------------------------------------------------------


def pack_bits(values: Array, width: int) -> Array:
    """Unsigned numbers of ``width`` bits each, lowest bit first, packed without gaps into uint8."""
    if width == 0:
        return np.zeros(0, np.uint8)
    bits = values.astype(np.int64)[:, None] >> np.arange(width) & 1
    return np.packbits(bits.astype(np.uint8).ravel(), bitorder="little")


def unpack_bits(buffer: Array, width: int, count: int) -> Array:
    """The inverse of :func:`pack_bits` [count] int64."""
    if width == 0:
        return np.zeros(count, np.int64)
    bits = np.unpackbits(buffer, count=count * width, bitorder="little").reshape(count, width)
    return bits.astype(np.int64) @ (np.int64(1) << np.arange(width, dtype=np.int64))


def set_bits(positions: Array, num_bits: int) -> Array:
    """A bitmap of ``num_bits`` with these (distinct) positions set, packed into uint8."""
    bits = np.zeros(num_bits, np.uint8)
    bits[positions] = 1
    return np.packbits(bits, bitorder="little")


def find_bits(buffer: Array, num_bits: int) -> Array:
    """The positions of the set bits, ascending int64."""
    return np.flatnonzero(np.unpackbits(buffer, count=num_bits, bitorder="little"))
