"""Selection: select elements by magnitude (documented in :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdcompress.ops.numpy.memory import index_range
from hvdcompress.ops.shared import index_dtype
from hvdcompress.ops.vectors import NumpyArray as Array
from hvdcompress.ops.vectors import Scalar, Sparse


def top_k(x: Array, k: int) -> Array:
    if not 0 < k < x.size:
        return index_range(min(k, x.size), x)
    magnitude = np.abs(x)
    threshold = np.partition(magnitude, x.size - k)[x.size - k]
    above = np.flatnonzero(magnitude > threshold)
    ties = np.flatnonzero(magnitude == threshold)[: k - above.size]
    return np.sort(np.concatenate([above, ties])).astype(index_dtype(x.size))


def top_k_parts(x: Array, counts: Sequence[int], sizes: Sequence[int]) -> Array:
    stops = np.cumsum(sizes)
    parts = [
        top_k(x[stop - size : stop], k) + (stop - size) for k, size, stop in zip(counts, sizes, stops, strict=True)
    ]
    return np.concatenate(parts).astype(index_dtype(x.size))


def largest_of(candidates: Sequence[Sparse], counts: Sequence[int], starts: Sequence[int]) -> tuple[Sparse, Array]:
    chosen = [top_k(each.values, k) for each, k in zip(candidates, counts, strict=True)]
    values = [each.values[kept] for each, kept in zip(candidates, chosen, strict=True)]
    index = [each.index[kept] + start for each, kept, start in zip(candidates, chosen, starts, strict=True)]
    least = [np.abs(each).min() if each.size else 0 for each in values]
    return Sparse(np.concatenate(index), np.concatenate(values)), np.array(least, np.float32)


def kth_magnitude(x: Array, k: int) -> float:
    return float(np.partition(np.abs(x), x.size - k)[x.size - k]) if x.size else 0.0


def count_above(x: Array, threshold: Scalar) -> int:
    return int(np.count_nonzero(np.abs(x) > np.float32(threshold)))


def first_above(x: Array, threshold: Scalar, capacity: int) -> Array:
    index = np.flatnonzero(np.abs(x) > np.float32(threshold))[:capacity]
    return index.astype(index_dtype(x.size))


def first_equal(x: Array, threshold: Scalar, capacity: int) -> Array:
    index = np.flatnonzero(np.abs(x) == np.float32(threshold))[:capacity]
    return index.astype(index_dtype(x.size))


def chunk_argmax(x: Array, chunk: int) -> Array:
    whole = x.size // chunk * chunk
    offset = np.abs(x[:whole].reshape(-1, chunk)).argmax(axis=1)
    if whole < x.size:
        offset = np.append(offset, np.abs(x[whole:]).argmax())
    return offset.astype(np.int32)


def chunk_positions(offset: Array, chunk: int, sizes: Sequence[int]) -> Array:
    start = []
    last = []
    for end, size in zip(np.cumsum(sizes, dtype=np.int64).tolist(), sizes, strict=True):
        start.append(np.arange(end - size, end, chunk, dtype=np.int64))
        last.append(np.full(start[-1].size, end - 1))
    return np.minimum(np.concatenate(start) + offset, np.concatenate(last)).astype(index_dtype(sum(sizes)))
