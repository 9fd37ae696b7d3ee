"""Gradients as matrices: the layout and slices of convolutions, and sums of projections that cannot overflow."""

from __future__ import annotations

import math
from collections.abc import Generator
from functools import lru_cache
from typing import Any, Literal

from hvdcompress.method import Array, Context, TensorSpec, Values, Workspace
from hvdcompress.ops.spec import Ops
from hvdcompress.parts import codecs

Axes = tuple[int, ...]
Order = Literal["oihw", "hwio"]

WIDEST = 4096  #: elements per slice, at most, where there is a choice
USUAL = 768  #: elements per slice in Yu et al. 2018


def blocks(spec: TensorSpec, order: Order = "hwio") -> tuple[int, int]:
    """Return what is adjacent in an order, and how often it comes: (F·D, H·W) or (D·H·W, F) of a convolution.

    Args:
        spec: the tensor: F filters of depth D on windows of H·W positions. A matrix or a vector has one position.
        order: "hwio": the weights of all filters at one position. "oihw": one filter's weights.

    Returns:
        The elements of a block, and the number of blocks.
    """
    across = spec.shape[-2:] if spec.layout == "hwio" else spec.shape[:2]
    if order == "oihw":
        across = across[-1:] if spec.layout == "hwio" else across[:1]
        count = math.prod(across)
        return spec.size // max(count, 1), count
    block = math.prod(across)
    return block, spec.size // max(block, 1)


@lru_cache
def slice_for(block: int, places: int) -> int:
    """Choose the elements per slice, near 768: a multiple of a block of at most 4096, or else a divisor of a block.

    Args:
        block: elements of a block (see :func:`blocks`).
        places: number of blocks.

    Returns:
        The elements per slice. Such slices fill the tensor without a rest.
    """
    slices = [times * block for times in range(1, places + 1) if places % times == 0 and times * block <= WIDEST]
    if not slices:
        low = [part for part in range(1, math.isqrt(block) + 1) if block % part == 0]
        slices = [*low, *(block // part for part in low)]
    return min(slices, key=lambda size: abs(math.log(max(size, 1) / USUAL)))


def arranged(x: Array, spec: TensorSpec, ops: Ops, order: Order = "hwio") -> Array:
    """Reorder ``x`` [n], so that it lies in the same order whichever framework it comes from.

    In order "hwio" the element of filter f, depth d and window position (h, w) gets the index ((h·W + w)·D + d)·F + f:
    the same weight of all filters is adjacent (Yu et al. 2018, §3.2). In order "oihw" it gets ((f·D + d)·H + h)·W + w:
    the weights of one filter are adjacent. A tensor that is stored in the order is not touched.

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
    """Return to stored order: the inverse of :func:`arranged`, [n] to [n]."""
    if spec.layout == order:
        return x
    shape = tuple(spec.shape[axis] for axis in _axes(len(spec.shape), order))
    return ops.permute(x, shape, _axes(len(shape), spec.layout))


def _axes(ndim: int, order: Order) -> Axes:
    """Return the axes of the other order in this one."""
    last = min(ndim, 2)
    if order == "hwio":
        return (*range(2, ndim), *reversed(range(last)))
    return (*reversed(range(ndim - last, ndim)), *range(ndim - last))


def norm(x: Array, ops: Ops) -> float:
    """Return ‖x‖, from sums in float64."""
    mean, std = ops.moments(x)
    return math.sqrt(len(x) * mean * mean + max(len(x) - 1, 0) * std * std)


def shrinkage(length: int, world: int) -> float:
    """Return the factor that keeps sums of projections finite: a power of two of at most 1/(p·√length).

    For u of norm 1, |⟨x, u⟩| ≤ ‖x‖ ≤ √length·max|x|. Multiplied by the factor, the sum of p such projections is at most
    max|x|, and therefore finite.

    Args:
        length: elements of x.
        world: number of ranks, p.
    """
    return 2.0 ** -math.ceil(math.log2(world * math.sqrt(length)))


def all_reduce(
    x: Array, shrunk: float, name: Values, ctx: Context, work: Workspace, stream: int = 0
) -> Generator[Any, Any, tuple[Array, Any]]:
    """Sum numbers over ranks that were multiplied by :func:`shrinkage`.

    fp16 has no range for numbers that small. It receives them at their original size, and too large ones saturate.

    Args:
        x: float32 [count], already multiplied by ``shrunk``.
        shrunk: the factor.
        name: the number format's name.
        ctx: rank, world, step and tensor.
        work: memory, findings and counters of this exchange, and the array ops.
        stream: a number that differs between the sums of one exchange, so that their random numbers differ.

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
