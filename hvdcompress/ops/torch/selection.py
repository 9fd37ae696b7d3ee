"""Selection: select elements by magnitude (documented in :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdcompress.ops.shared import index_dtype
from hvdcompress.ops.torch.memory import index_range, sort
from hvdcompress.ops.torch.tensors import dtype_of, f32, host, runs, uploaded, where
from hvdcompress.ops.vectors import Array, Scalar, Sparse


def top_k(x: Array, k: int) -> Array:
    if not 0 < k < len(x):
        return index_range(min(k, len(x)), x)
    magnitude = x.abs()
    # only the values of topk are used: which indices it returns for equal elements is undefined
    threshold = torch.topk(magnitude, k, sorted=False).values.min()
    above = where(magnitude > threshold)
    ties = where(magnitude == threshold)[: k - len(above)]
    return sort(torch.cat([above, ties]))


def top_k_parts(x: Array, counts: Sequence[int], sizes: Sequence[int]) -> Array:
    # One stable sort by part, then by descending magnitude. The elements of a part stay in its span, so the host does
    # not wait for the device.
    part, _ = runs(sizes, x)
    order = torch.sort(part << 31 | 0x7FFFFFFF - (x.view(torch.int32) & 0x7FFFFFFF), stable=True).indices
    size = uploaded(torch.tensor(sizes, device="cpu"), x)
    part, offset = runs([min(each) for each in zip(counts, sizes, strict=True)], x)
    return sort(order[(size.cumsum(0) - size)[part] + offset]).to(dtype_of(index_dtype(len(x))))


def largest_of(candidates: Sequence[Sparse], counts: Sequence[int], starts: Sequence[int]) -> tuple[Sparse, Array]:
    chosen = [top_k(each.values, k).to(torch.int64) for each, k in zip(candidates, counts, strict=True)]
    values = [each.values[kept] for each, kept in zip(candidates, chosen, strict=True)]
    index = [each.index[kept] + start for each, kept, start in zip(candidates, chosen, starts, strict=True)]
    least = [each.abs().min() if len(each) else each.new_zeros(()) for each in values]
    return Sparse(torch.cat(index), torch.cat(values)), torch.stack(least)


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
    size = uploaded(torch.tensor(sizes, device="cpu"), offset)
    stop = size.cumsum(0)
    part, number = runs([-(-each // chunk) for each in sizes], offset)  # number of the chunk in its part
    index = torch.minimum((stop - size)[part] + chunk * number + offset, stop[part] - 1)
    return index.to(dtype_of(index_dtype(sum(sizes))))
