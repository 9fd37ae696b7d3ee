"""Selection, compiled: select elements by magnitude (see :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdcompress.ops import pool
from hvdcompress.ops.numba._kernels import selection as kernels
from hvdcompress.ops.numba.arrays import INDICES, magnitude_bits, plain
from hvdcompress.ops.numba.memory import joined
from hvdcompress.ops.numpy import NumpyOps
from hvdcompress.ops.shared import index_dtype
from hvdcompress.ops.vectors import NumpyArray as Array
from hvdcompress.ops.vectors import Scalar, Sparse


def _indices(x: Array, low: int, high: int, capacity: int) -> Array:
    """Return the first ``capacity`` indices, ascending, of magnitudes whose bits are in [low, high]."""
    out = pool.empty(min(capacity, x.size), index_dtype(x.size))
    return out[: kernels.find(x.view(np.int32), np.int32(low), np.uint32(high - low), out)]


class SelectionOps(NumpyOps):
    """Select elements by magnitude."""

    def top_k(self, x: Array, k: int) -> Array:
        # The histogram of a sample gives a magnitude that somewhat more than k elements reach; the k largest of these
        # candidates are then selected. If there are too few or too many candidates because the sample was not
        # representative, the histogram of all elements gives the magnitude with certainty.
        n = x.size
        if not plain(x) or not 0 < k < n:
            return super().top_k(x, k)
        for stride in (n >> 16 | 1, 1):  # odd, so that the sample is not always from the same columns of a matrix
            count = kernels.histogram(x.view(np.int32), stride)[::-1].cumsum()
            bucket = int(np.searchsorted(count, k if stride == 1 else min(1.2 * k / stride + 30, count[-1])))
            if bucket == 2047:  # nearly all elements are 0, as in an embedding of which few rows were used
                nonzero = _indices(x, 1, 0x7FFFFFFF, k)
                if nonzero.size < k:
                    return np.sort(np.concatenate([nonzero, _indices(x, 0, 0, k - nonzero.size)]))
            # at most twice the estimated number of candidates; if all of this capacity is used, there are too many
            capacity = int(count[bucket]) * (1 if stride == 1 else 2 * stride) + 1
            candidates = _indices(x, (2047 - bucket) << 20, 0x7FFFFFFF, capacity)
            if k <= candidates.size < capacity:
                break
        return self.largest_of([Sparse(candidates, self.take(x, candidates))], [k], [0])[0].index

    def largest_of(
        self, candidates: Sequence[Sparse], counts: Sequence[int], starts: Sequence[int]
    ) -> tuple[Sparse, Array]:
        index, values = candidates[0] if len(candidates) == 1 else map(joined, zip(*candidates, strict=True))
        sizes = [each.values.size for each in candidates]
        too_few = any(k > size for k, size in zip(counts, sizes, strict=True))
        if too_few or not plain(values) or index.dtype not in INDICES or not plain(index, dtype=index.dtype):
            return super().largest_of(candidates, counts, starts)
        total = sum(counts)
        parts = np.array([sizes, counts, starts], np.int64)
        # one more than needed, because the kernel writes an entry before it decides whether to keep it
        chosen = pool.empty(total + 1, index.dtype)
        kept = pool.empty(total + 1, np.float32)
        least = np.empty(len(sizes), np.float32)
        scratch = pool.empty(max(sizes), np.int32)
        kernels.largest_of(index, values.view(np.int32), values, parts, scratch, chosen, kept, least.view(np.int32))
        return Sparse(chosen[:total], kept[:total]), least

    def count_above(self, x: Array, threshold: Scalar) -> int:
        if not plain(x) or threshold < 0:
            return super().count_above(x, threshold)
        return int(kernels.count(x.view(np.int32), np.int32(magnitude_bits(threshold) + 1)))

    def first_above(self, x: Array, threshold: Scalar, capacity: int) -> Array:
        if not plain(x) or threshold < 0:
            return super().first_above(x, threshold, capacity)
        return _indices(x, int(magnitude_bits(threshold)) + 1, 0x7FFFFFFF, capacity)
