"""Selection: choose elements by magnitude (:class:`hvdcompress.ops.spec.Ops` says what each verb does)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdcompress.ops.shared import index_dtype
from hvdcompress.ops.torch.memory import index_range, sort
from hvdcompress.ops.torch.tensors import dtype_of, f32, host, where
from hvdcompress.ops.vectors import Array, Scalar, Sparse


def top_k(x: Array, k: int) -> Array:
    if k >= len(x):
        return index_range(len(x), x)
    magnitude = x.abs()
    threshold = torch.topk(magnitude, k, sorted=False).values.min()  # which of equal elements it takes is undefined
    above = where(magnitude > threshold)
    ties = where(magnitude == threshold)[: k - len(above)]
    return sort(torch.cat([above, ties]))


def largest_of(candidates: Sparse, k: int) -> tuple[Sparse, Array]:
    chosen = top_k(candidates.values, k).to(torch.int64)
    values = candidates.values[chosen]
    return Sparse(candidates.index[chosen], values), values.abs().min()


def kth_magnitude(x: Array, k: int) -> float:
    return host(torch.topk(x.abs(), k, sorted=False).values.min()) if len(x) else 0.0


def count_above(x: Array, threshold: Scalar) -> int:
    return host((x.abs() > f32(threshold)).sum())


def first_above(x: Array, threshold: Scalar, capacity: int) -> Array:
    return where(x.abs() > f32(threshold))[:capacity]


def first_equal(x: Array, threshold: Scalar, capacity: int) -> Array:
    return where(x.abs() == f32(threshold))[:capacity]


def chunk_argmax(x: Array, chunk: int) -> Array:
    whole = len(x) // chunk * chunk
    offset = x[:whole].view(-1, chunk).abs().argmax(1)  # the first of equal elements, as torch documents
    if whole < len(x):
        offset = torch.cat([offset, x[whole:].abs().argmax(0, keepdim=True)])
    return offset.to(torch.int32)


def chunk_positions(offset: Array, chunk: int, sizes: Sequence[int]) -> Array:
    positions, place, start = [], 0, 0
    for size in sizes:
        first = torch.arange(start, start + size, chunk, dtype=torch.int64, device=offset.device)
        start += size
        positions.append((first + offset[place : place + len(first)]).clamp_(max=start - 1))
        place += len(first)
    return torch.cat(positions).to(dtype_of(index_dtype(start)))
