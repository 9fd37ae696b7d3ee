"""Memory: create, view and rearrange arrays (documented in :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

import numpy as np

from hvdcompress.ops.shared import index_dtype
from hvdcompress.ops.vectors import NumpyArray as Array

ALIGNMENT = 64  #: bytes: a cache line; other libraries use arrays with this alignment without a copy


def zeros(size: int, dtype: str, like: Array) -> Array:
    num_bytes = size * np.dtype(dtype).itemsize
    return aligned(np.zeros(num_bytes + ALIGNMENT, np.uint8), num_bytes).view(dtype)


def aligned(memory: Array, num_bytes: int) -> Array:
    """Return a view [num_bytes] of ``memory`` (uint8) that starts at a multiple of ``ALIGNMENT``."""
    address: int = memory.__array_interface__["data"][0]  # ten times as fast as ctypes.data
    start = -address % ALIGNMENT
    return memory[start : start + num_bytes]


def asarray(values: Array, like: Array) -> Array:
    return np.asarray(values)


def concat(arrays: list[Array], out: Array | None = None) -> Array:
    return arrays[0] if len(arrays) == 1 and out is None else np.concatenate(arrays, out=out)


def to_bytes(x: Array) -> Array:
    return np.ascontiguousarray(x).view(np.uint8)


def from_bytes(buffer: Array, dtype: str) -> Array:
    found = buffer.view(dtype)
    return found if found.flags.aligned else buffer.copy().view(dtype)


def head_bytes(buffer: Array, num_bytes: int) -> bytes:
    return buffer[:num_bytes].tobytes()


def fill(out: Array, value: float) -> None:
    out[...] = value


def take(x: Array, index: Array) -> Array:
    return x[index]


def stamp(stamps: Array, now: int, index: Array, out: Array) -> Array:
    out[...] = stamps
    out[index] = now
    return np.int8(now) - stamps[index]


def take_weighted(x: Array, index: Array, weights: Array, which: Array) -> Array:
    return x[index] * weights[which]


def add_once(x: Array, index: Array, values: Array, factor: float) -> None:
    x[index] = x[index] + np.float32(factor) * values


def sort(x: Array) -> Array:
    return np.sort(x)


def searchsorted(ascending: Array, x: Array) -> Array:
    return np.searchsorted(ascending, x)


def index_range(n: int, like: Array) -> Array:
    return np.arange(n, dtype=index_dtype(n))
