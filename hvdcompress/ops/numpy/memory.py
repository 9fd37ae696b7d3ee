"""Memory: make, view and rearrange arrays (:class:`hvdcompress.ops.spec.Ops` says what each verb does)."""

from __future__ import annotations

import numpy as np

from hvdcompress.ops.shared import index_dtype
from hvdcompress.ops.vectors import NumpyArray as Array


def zeros(size: int, dtype: str, like: Array) -> Array:
    return np.zeros(size, dtype)


def asarray(values: Array, like: Array) -> Array:
    return np.asarray(values)


def concat(arrays: list[Array], out: Array | None = None) -> Array:
    return arrays[0] if len(arrays) == 1 and out is None else np.concatenate(arrays, out=out)


def to_bytes(x: Array) -> Array:
    return np.ascontiguousarray(x).view(np.uint8)


def from_bytes(buffer: Array, dtype: str) -> Array:
    if buffer.ctypes.data % np.dtype(dtype).itemsize:
        buffer = buffer.copy()
    return buffer.view(dtype)


def head_bytes(buffer: Array, num_bytes: int) -> bytes:
    return buffer[:num_bytes].tobytes()


def fill(out: Array, value: float) -> None:
    out[...] = value


def take(x: Array, index: Array) -> Array:
    return x[index]


def sort(x: Array) -> Array:
    return np.sort(x)


def index_range(n: int, like: Array) -> Array:
    return np.arange(n, dtype=index_dtype(n))
