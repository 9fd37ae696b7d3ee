"""Selection in Triton: choose elements by magnitude (see :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

from typing import Any

import torch

from hvdcompress.ops import torch as general
from hvdcompress.ops.torch.tensors import f32, host
from hvdcompress.ops.triton._kernels import selection as kernels
from hvdcompress.ops.triton._kernels.launching import BLOCK, blocks, launch
from hvdcompress.ops.triton.tensors import empty, indices, plain
from hvdcompress.ops.vectors import Array, Scalar

TILE = 2048  #: elements of a program that finds the largest of chunks
WIDEST = 4096  #: elements of the largest chunk that one program can hold


def top_k(x: Array, k: int) -> Array:
    # The k-th magnitude stays on the device, and that k indices come out is known: the host need not wait.
    n = len(x)
    if not 0 < k < n or not plain(x):
        return general.top_k(x, k)
    threshold = torch.topk(x.abs(), k, sorted=False).values.min()
    counts = empty(2 * blocks(n), torch.int32, x)
    launch(kernels.count_two, blocks(n), x, x, threshold, counts, n, blocks(n), BLOCK=BLOCK)
    ends = counts.view(2, -1).cumsum(1)
    index = indices(k, n, x).zero_()  # valid even if x had a NaN, to which nothing is equal
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
    """Return how many chunks a program takes, and as how many elements each counts; None if a chunk is too large."""
    width = 1 << (chunk - 1).bit_length()
    return {"ROWS": max(1, TILE // width), "WIDTH": width} if width <= WIDEST else None


def compacted(x: Array, threshold: Scalar, ends: Array, room: int, equal: bool = False, values: Any = None) -> Array:
    """Return the first ``room`` indices of what was counted, ascending.

    Args:
        x: [n].
        threshold: what |x| exceeds, or is equal to.
        ends: the counts of the programs, added up.
        room: how many; not more than were counted.
        equal: whether |x| is equal to the threshold.
        values: [room] that receives the elements; None: nobody wants them.
    """
    n, index = len(x), indices(room, len(x), x)
    if room:
        given = x, f32(threshold), ends, index, x if values is None else values, n, room
        launch(kernels.compact, blocks(n), x, *given, EQUAL=equal, VALUES=values is not None, BLOCK=BLOCK)
    return index


def _ends(x: Array, threshold: Scalar, equal: bool) -> Array:
    """Return how many are chosen up to the end of each program's elements."""
    counts = empty(blocks(len(x)), torch.int32, x)
    launch(kernels.count, len(counts), x, x, f32(threshold), counts, len(x), EQUAL=equal, BLOCK=BLOCK)
    return counts.cumsum(0)


def _first(x: Array, threshold: Scalar, capacity: int, equal: bool) -> Array:
    ends = _ends(x, threshold, equal)
    return compacted(x, threshold, ends, min(host(ends[-1]), capacity), equal)
