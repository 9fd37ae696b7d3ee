"""Memory: create, view and rearrange tensors (documented in :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

import torch

from hvdcompress.ops.shared import index_dtype
from hvdcompress.ops.torch.tensors import dtype_of, f32, host, uploaded, view_as
from hvdcompress.ops.vectors import Array, NumpyArray


def zeros(size: int, dtype: str, like: Array) -> Array:
    return torch.zeros(size, dtype=dtype_of(dtype), device=like.device)


def asarray(values: NumpyArray, like: Array) -> Array:
    return uploaded(torch.from_numpy(values if values.flags.writeable else values.copy()), like)


def concat(arrays: list[Array], out: Array | None = None) -> Array:
    return arrays[0] if len(arrays) == 1 and out is None else torch.cat(arrays, out=out)


def to_bytes(x: Array) -> Array:
    return view_as(x.contiguous(), torch.uint8)


def from_bytes(buffer: Array, dtype: str) -> Array:
    wanted = dtype_of(dtype)
    if buffer.data_ptr() % wanted.itemsize or buffer.storage_offset() % wanted.itemsize:
        buffer = buffer.clone()
    return view_as(buffer, wanted)


def head_bytes(buffer: Array, num_bytes: int) -> bytes:
    return bytes(host(buffer[:num_bytes]))


def fill(out: Array, value: float) -> None:
    out.fill_(value)


def take(x: Array, index: Array) -> Array:
    return x.index_select(0, index)


def stamp(stamps: Array, now: int, index: Array, out: Array) -> Array:
    out.copy_(stamps).index_fill_(0, index.long(), now)
    return now - stamps.index_select(0, index)


def take_weighted(x: Array, index: Array, weights: Array, which: Array) -> Array:
    return x.index_select(0, index) * weights.index_select(0, which.int())


def add_once(x: Array, index: Array, values: Array, factor: float) -> None:
    at = index.long()
    x[at] = x[at] + values * f32(factor)


def sort(x: Array) -> Array:
    return torch.sort(x).values


def searchsorted(ascending: Array, x: Array) -> Array:
    return torch.searchsorted(ascending.long(), x.long())


def index_range(n: int, like: Array) -> Array:
    return torch.arange(n, dtype=dtype_of(index_dtype(n)), device=like.device)
