"""Gradients as matrices: layouts and slices of convolutions, and sums of projections that cannot overflow."""

from __future__ import annotations

import math
from collections.abc import Generator
from functools import lru_cache
from typing import Any, Literal

from hvdcompress.method import Array, Context, TensorSpec, Values, Workspace
from hvdcompress.ops.spec import Ops
from hvdcompress.parts import codecs

Order = Literal["oihw", "hwio"]

WIDEST = 4096  #: maximum number of elements per slice, where there is a choice
USUAL = 768  #: elements per slice in Yu et al. 2018


def blocks(spec: TensorSpec, order: Order = "hwio") -> tuple[int, int]:
    """Return the size and number of blocks of adjacent elements: (F·D, H·W) or (D·H·W, F) for a convolution.

    Args:
        spec: the tensor: F filters of depth D on windows of H·W positions. A matrix or a vector has one position.
        order: "hwio": a block has the weights of all filters at one position. "oihw": a block has the weights of one
            filter.

    Returns:
        Elements per block, and the number of blocks.
    """
    across = spec.shape[-2:] if spec.layout == "hwio" else spec.shape[:2]
    if order == "oihw":
        across = across[-1:] if spec.layout == "hwio" else across[:1]
        count = math.prod(across)
        return spec.size // max(count, 1), count
    block = math.prod(across)
    return block, spec.size // max(block, 1)


@lru_cache
def slice_for(block: int, count: int) -> int:
    """Choose the slice size near 768: a multiple of the block size of at most 4096, or else a divisor of it.

    Args:
        block: elements per block (see :func:`blocks`).
        count: number of blocks.

    Returns:
        Elements per slice. Slices of this size fill the tensor exactly.
    """
    slices = [times * block for times in range(1, count + 1) if count % times == 0 and times * block <= WIDEST]
    if not slices:
        low = [part for part in range(1, math.isqrt(block) + 1) if block % part == 0]
        slices = [*low, *(block // part for part in low)]
    return min(slices, key=lambda size: abs(math.log(max(size, 1) / USUAL)))


def arranged(x: Array, spec: TensorSpec, ops: Ops, order: Order = "hwio") -> Array:
    """Reorder ``x`` so that its order does not depend on the framework.

    In order "hwio" the element of filter f, depth d and window position (h, w) gets the index ((h·W + w)·D + d)·F + f:
    the same weight of all filters is adjacent (Yu et al. 2018, §3.2). In order "oihw" it gets ((f·D + d)·H + h)·W + w:
    the weights of one filter are adjacent. A tensor that is already stored in the order is returned unchanged.

    Args:
        x: the elements in stored order [n].
        spec: the tensor.
        ops: the array backend.
        order: the new order.

    Returns:
        The elements in the new order [n].
    """
    return x if spec.layout == order else ops.permute(x, spec.shape, _axes(len(spec.shape), order))


def stored_order(x: Array, spec: TensorSpec, ops: Ops, order: Order = "hwio") -> Array:
    """Reorder [n] elements to stored order: the inverse of :func:`arranged`."""
    if spec.layout == order:
        return x
    shape = tuple(spec.shape[axis] for axis in _axes(len(spec.shape), order))
    return ops.permute(x, shape, _axes(len(shape), spec.layout))


def _axes(ndim: int, order: Order) -> tuple[int, ...]:
    """Return the permutation of axes from the other order to this one."""
    last = min(ndim, 2)
    if order == "hwio":
        return (*range(2, ndim), *reversed(range(last)))
    return (*reversed(range(ndim - last, ndim)), *range(ndim - last))


@lru_cache
def shrinkage(length: int, world_size: int) -> float:
    """Return a factor that keeps sums of projections finite: a power of two of at most 1/(p·√length).

    For u of norm 1, |⟨x, u⟩| ≤ ‖x‖ ≤ √length·max|x|. After multiplication by the factor, the sum of p such projections
    is at most max|x|, and therefore finite.

    Args:
        length: elements of x.
        world_size: number of ranks, p.
    """
    return 2.0 ** -math.ceil(math.log2(world_size * math.sqrt(length)))


def all_reduce(
    x: Array, shrunk: float, name: Values, ctx: Context, work: Workspace, stream: int = 0
) -> Generator[Any, Any, tuple[Array, Any]]:
    """Sum numbers over ranks that were multiplied by :func:`shrinkage`.

    fp16 cannot represent numbers this small. It gets them in their original size, and too large ones are clipped.

    Args:
        x: float32 [count], already multiplied by ``shrunk``.
        shrunk: the factor.
        name: name of the number format.
        ctx: rank, world_size, step and tensor.
        work: buffers, scan results and counters of this exchange, and the array ops.
        stream: index of the sum within the exchange, so that each sum has its own random numbers.

    Yields:
        The collectives of ``codecs.all_reduce``.

    Returns:
        The sum [count] and this rank's share [count] or None, both multiplied by ``shrunk``.
    """
    if name != "fp16":
        return (yield from codecs.all_reduce(x, name, ctx, work, stream))
    ops = work.ops
    total, own = yield from codecs.all_reduce(ops.scaled(x, 1.0 / shrunk), name, ctx, work)
    return ops.scaled(total, shrunk), ops.scaled(own, shrunk) if ctx.needs_own else None
