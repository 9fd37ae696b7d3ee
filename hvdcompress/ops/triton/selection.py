"""Selection in Triton: select elements by magnitude (see :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

from typing import Any

import torch

from hvdcompress.ops import torch as general
from hvdcompress.ops.torch.tensors import f32, host
from hvdcompress.ops.triton._kernels import selection as kernels
from hvdcompress.ops.triton._kernels.launching import BLOCK, blocks, launch
from hvdcompress.ops.triton.tensors import empty, indices, plain
from hvdcompress.ops.vectors import Array, Scalar

TILE = 2048  #: number of elements per program of chunk_argmax
MAX_CHUNK = 4096  #: maximum chunk size, which one program holds


def top_k(x: Array, k: int) -> Array:
    # The k-th magnitude stays on the device, and the number of indices is known to be k, so the host need not wait.
    n = len(x)
    if not 0 < k < n or not plain(x):
        return general.top_k(x, k)
    threshold = torch.topk(x.abs(), k, sorted=False).values.min()
    counts = empty(2 * blocks(n), torch.int32, x)
    launch(kernels.count_two, blocks(n), x, x, threshold, counts, n, blocks(n), BLOCK=BLOCK)
    ends = counts.view(2, -1).cumsum(1)
    index = indices(k, n, x).zero_()  # zeros, so that all indices are valid even if x contains NaN
    launch(kernels.compact_two, blocks(n), x, x, threshold, ends, index, n, k, blocks(n), BLOCK=BLOCK)
    return index


def count_above(x: Array, threshold: Scalar) -> int:
    return host(_ends(x, threshold, False)[-1]) if plain(x) else general.count_above(x, threshold)


def first_above(x: Array, threshold: Scalar, capacity: int) -> Array:
    return _first(x, threshold, capacity, False) if plain(x) else general.first_above(x, threshold, capacity)


def first_equal(x: Array, threshold: Scalar, capacity: int) -> Array:
    return _first(x, threshold, capacity, True) if plain(x) else general.first_equal(x, threshold, capacity)


def chunk_argmax(x: Array, chunk: int) -> Array:
    shape = tile(chunk)
    if not shape or not plain(x):
        return general.chunk_argmax(x, chunk)
    offset = empty(-(-len(x) // chunk), torch.int32, x)
    given = x, offset, len(x), chunk, len(offset)
    launch(kernels.chunk_argmax, blocks(len(offset), shape["ROWS"]), x, *given, **shape)
    return offset


def tile(chunk: int) -> dict[str, int] | None:
    """Return the tile of a program, chunks × padded chunk size; None if a chunk is too large."""
    width = 1 << (chunk - 1).bit_length()
    return {"ROWS": max(1, TILE // width), "WIDTH": width} if width <= MAX_CHUNK else None


def compacted(x: Array, threshold: Scalar, ends: Array, room: int, equal: bool = False, values: Any = None) -> Array:
    """Return the first ``room`` indices with |x| > threshold, ascending.

    Args:
        x: [n].
        threshold: The threshold.
        ends: Cumulative counts of the programs, from :func:`_ends`.
        room: Number of indices, at most the number counted.
        equal: Select |x| = threshold instead.
        values: [room] that receives the elements, or None.
    """
    n = len(x)
    index = indices(room, len(x), x)
    if room:
        given = x, f32(threshold), ends, index, x if values is None else values, n, room
        launch(kernels.compact, blocks(n), x, *given, EQUAL=equal, VALUES=values is not None, BLOCK=BLOCK)
    return index


def _ends(x: Array, threshold: Scalar, equal: bool) -> Array:
    """Return the cumulative number of selected elements at the end of each program."""
    counts = empty(blocks(len(x)), torch.int32, x)
    launch(kernels.count, len(counts), x, x, f32(threshold), counts, len(x), EQUAL=equal, BLOCK=BLOCK)
    return counts.cumsum(0)


def _first(x: Array, threshold: Scalar, capacity: int, equal: bool) -> Array:
    ends = _ends(x, threshold, equal)
    return compacted(x, threshold, ends, min(host(ends[-1]), capacity), equal)
