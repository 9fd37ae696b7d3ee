"""Gradients as matrices: how a convolution is laid out and cut, and sums of projections that cannot overflow."""

from __future__ import annotations

import math
from collections.abc import Generator
from functools import lru_cache
from typing import Any

from hvdcompress.method import Array, Context, TensorSpec, Values
from hvdcompress.parts import codecs

Axes = tuple[int, ...]

WIDEST = 4096  #: elements of a slice, where it can be chosen
USUAL = 768  #: the slice of Yu et al. 2018


def filters(spec: TensorSpec) -> tuple[int, int]:
    """(F·D, H·W): filters times their depth, and the places of a filter's window.

    A matrix or a vector is a window of one place.
    """
    ends = spec.shape[-2:] if spec.layout == "hwio" else spec.shape[:2]
    block = math.prod(ends)
    return block, spec.size // max(block, 1)


@lru_cache
def slice_for(block: int, places: int) -> int:
    """The slice nearest to 768: a multiple of F·D of at most 4096 that fills the tensor, else a divisor of F·D."""
    slices = [times * block for times in range(1, places + 1) if places % times == 0 and times * block <= WIDEST]
    if not slices:
        low = [part for part in range(1, math.isqrt(block) + 1) if block % part == 0]
        slices = [*low, *(block // part for part in low)]
    return min(slices, key=lambda size: abs(math.log(max(size, 1) / USUAL)))


def collocated(x: Array, spec: TensorSpec, ops: Any) -> Array:
    """``x`` [n] vectorised so that the same weight of all filters is adjacent, then depth, width, height [n].

    ((h·W + w)·D + d)·F + f in any framework (Yu et al. 2018, §3.2): "hwio" lies so, "oihw" is turned round.
    """
    axes = _axes(spec)
    return x if spec.layout == "hwio" else ops.permute(x, spec.shape, axes)


def as_it_lay(x: Array, spec: TensorSpec, ops: Any) -> Array:
    """The inverse of :func:`collocated` [n]."""
    axes = _axes(spec)
    back = tuple(axes.index(axis) for axis in range(len(axes)))
    return x if spec.layout == "hwio" else ops.permute(x, tuple(spec.shape[axis] for axis in axes), back)


def _axes(spec: TensorSpec) -> Axes:
    ndim = len(spec.shape)
    return (*range(2, ndim), *reversed(range(min(ndim, 2))))


def norm(x: Array, ops: Any) -> float:
    """‖x‖, from sums in float64."""
    mean, std = ops.moments(x)
    return math.sqrt(len(x) * mean * mean + max(len(x) - 1, 0) * std * std)


def shrinkage(length: int, world: int) -> float:
    """A power of two of at most 1/(p·√length).

    |⟨x, u⟩| ≤ ‖x‖ ≤ √length·max|x| for u of length 1. So much smaller, the sum of p such products is at most
    max|x|, and finite whatever x is.
    """
    return 2.0 ** -math.ceil(math.log2(world * math.sqrt(length)))


def all_reduce(
    x: Array, shrunk: float, name: Values, ctx: Context, ops: Any, stream: int = 0
) -> Generator[Any, Any, tuple[Array, Any]]:
    """``codecs.all_reduce`` of numbers that :func:`shrinkage` has made small, in the same units.

    fp16 has no range for that: it gets them at their own size, and what is too large for it saturates.
    """
    if name != "fp16":
        return (yield from codecs.all_reduce(x, name, ctx, ops, stream))
    total, own = yield from codecs.all_reduce(ops.scaled(x, 1.0 / shrunk), name, ctx, ops)
    return ops.scaled(total, shrunk), ops.scaled(own, shrunk) if ctx.needs_own else None
