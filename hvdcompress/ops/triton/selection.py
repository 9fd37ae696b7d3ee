"""Selection in Triton: select elements by magnitude (see :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

from typing import Any

import torch

from hvdcompress.ops.shared import f32
from hvdcompress.ops.torch import TorchOps
from hvdcompress.ops.triton._kernels import selection as kernels
from hvdcompress.ops.triton._kernels.launching import BLOCK, blocks, launch
from hvdcompress.ops.triton.tensors import empty, indices, plain
from hvdcompress.ops.vectors import Array, Scalar

TILE = 2048  #: number of elements per program of chunk_argmax
MAX_CHUNK = 4096  #: maximum chunk size, which one program holds


def tile(chunk: int) -> dict[str, int] | None:
    """Return the tile of a program, chunks × padded chunk size; None if a chunk is too large."""
    width = 1 << (chunk - 1).bit_length()
    return {"ROWS": max(1, TILE // width), "WIDTH": width} if width <= MAX_CHUNK else None


def compacted(x: Array, threshold: Scalar, ends: Array, room: int, values: Any = None) -> Array:
    """Return the first ``room`` indices with |x| > threshold, ascending.

    Args:
        x: [n].
        threshold: The threshold.
        ends: Cumulative counts of the programs, from :func:`_ends`.
        room: Number of indices, at most the number counted.
        values: [room] that receives the elements, or None.
    """
    n = len(x)
    index = indices(room, len(x), x)
    if room:
        given = x, f32(threshold), ends, index, x if values is None else values, n, room
        launch(kernels.compact, blocks(n), x, *given, VALUES=values is not None, BLOCK=BLOCK)
    return index


def _ends(x: Array, threshold: Scalar) -> Array:
    """Return the cumulative number of selected elements at the end of each program."""
    counts = empty(blocks(len(x)), torch.int32, x)
    launch(kernels.count, len(counts), x, x, f32(threshold), counts, len(x), BLOCK=BLOCK)
    return counts.cumsum(0)


def _first(x: Array, threshold: Scalar, capacity: int) -> Array:
    ends = _ends(x, threshold)
    return compacted(x, threshold, ends, min(int(ends[-1]), capacity))


class SelectionOps(TorchOps):
    """Select elements by magnitude."""

    def top_k(self, x: Array, k: int) -> Array:
        # The k-th magnitude stays on the device, and the number of indices is known to be k, so the host need not wait.
        n = len(x)
        if not 0 < k < n or not plain(x):
            return super().top_k(x, k)
        threshold = torch.topk(x.abs(), k, sorted=False).values.min()
        counts = empty(2 * blocks(n), torch.int32, x)
        launch(kernels.count_two, blocks(n), x, x, threshold, counts, n, blocks(n), BLOCK=BLOCK)
        ends = counts.view(2, -1).cumsum(1)
        index = indices(k, n, x).zero_()  # zeros, so that all indices are valid even if x contains NaN
        launch(kernels.compact_two, blocks(n), x, x, threshold, ends, index, n, k, blocks(n), BLOCK=BLOCK)
        return index

    def count_above(self, x: Array, threshold: Scalar) -> int:
        return int(_ends(x, threshold)[-1]) if plain(x) else super().count_above(x, threshold)

    def first_above(self, x: Array, threshold: Scalar, capacity: int) -> Array:
        return _first(x, threshold, capacity) if plain(x) else super().first_above(x, threshold, capacity)
