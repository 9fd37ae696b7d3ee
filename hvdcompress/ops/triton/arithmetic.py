"""Arithmetic in Triton: add, subtract and write dense and sparse tensors (see :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

from math import isfinite, nan

import torch

from hvdcompress.ops import torch as general
from hvdcompress.ops.shared import moments_of
from hvdcompress.ops.spec import Array, Flag, Half, Scalar, Sparse
from hvdcompress.ops.torch.tensors import f32, flag, host
from hvdcompress.ops.triton._kernels import arithmetic as kernels
from hvdcompress.ops.triton._kernels.launching import BLOCK, blocks, launch
from hvdcompress.ops.triton.selection import compacted, tile
from hvdcompress.ops.triton.statistics import finite_so_far
from hvdcompress.ops.triton.tensors import empty, plain, plain_sparse


def accumulate(gradient: Array, residual: Array, scale: float, out: Array, clear: bool = False) -> Flag:
    if not plain(gradient, residual, out):
        return general.accumulate(gradient, residual, scale, out, clear)
    n, finite = len(out), finite_so_far(out)
    given = gradient, residual, f32(scale), out, finite, n
    launch(kernels.accumulate, blocks(n), out, *given, CLEAR=clear, BLOCK=BLOCK)
    return flag(finite)


def accumulate_moments(
    gradient: Array, residual: Array, scale: float, out: Array, clear: bool = False
) -> tuple[float, float]:
    if not plain(gradient, residual, out):
        return general.accumulate_moments(gradient, residual, scale, out, clear)
    n = len(out)
    sums = empty(2 * blocks(n), torch.float64, out)
    launch(
        kernels.accumulate_moments, blocks(n), out,
        gradient, residual, f32(scale), out, sums, n, CLEAR=clear, BLOCK=BLOCK,
    )  # fmt: skip
    total, squares = host(sums.view(-1, 2).sum(0))
    return moments_of(total, squares, n) if isfinite(squares) else (nan, nan)


def accumulate_argmax(
    gradient: Array, residual: Array, scale: float, out: Array, chunk: int, clear: bool = False
) -> tuple[Flag, Array]:
    shape = tile(chunk)
    if not shape or not plain(gradient, residual, out):
        return accumulate(gradient, residual, scale, out, clear), general.chunk_argmax(out, chunk)
    n, finite = len(out), finite_so_far(out)
    offset = empty(-(-n // chunk), torch.int32, out)
    launch(
        kernels.accumulate_argmax, blocks(len(offset), shape["ROWS"]), out,
        gradient, residual, f32(scale), out, finite, offset, n, chunk, len(offset), CLEAR=clear, **shape,
    )  # fmt: skip
    return flag(finite), offset


def accumulate_above(
    gradient: Array,
    residual: Array,
    scale: float,
    out: Array,
    threshold: Scalar,
    capacity: int,
    clear: bool = False,
) -> tuple[Flag, Sparse]:
    if not plain(gradient, residual, out):
        return general.accumulate_above(gradient, residual, scale, out, threshold, capacity, clear)
    n, finite = len(out), finite_so_far(out)
    counts = empty(blocks(n), torch.int32, out)
    launch(
        kernels.accumulate_count, blocks(n), out,
        gradient, residual, f32(scale), out, finite, f32(threshold), counts, n, CLEAR=clear, BLOCK=BLOCK,
    )  # fmt: skip
    ends = counts.cumsum(0)
    known, found = host(torch.cat([finite, ends[-1:]]))
    values = empty(min(found, capacity), torch.float32, out)
    return known == 1, Sparse(compacted(out, threshold, ends, len(values), values=values), values)


def keep_if(finite: Flag, x: Array, other: Array | None = None) -> None:
    if isinstance(finite, bool) or not plain(x) or (other is not None and not plain(x, other)):
        general.keep_if(finite, x, other)
    else:
        given = x, x if other is None else other, finite.to(torch.int32), len(x)
        launch(kernels.keep_if, blocks(len(x)), x, *given, ZERO=other is None, BLOCK=BLOCK)


def blend(x: Array, residual: Array, beta: float) -> None:
    if plain(x, residual):
        given = x, residual, f32(beta), f32(1.0 - beta), len(x)
        launch(kernels.blend, blocks(len(x)), x, *given, BLOCK=BLOCK)
    else:
        general.blend(x, residual, beta)


def subtract(x: Array, own: Array | Sparse, factor: float) -> None:
    if plain(x) and plain_sparse(own):
        m = len(own.index)
        launch(kernels.subtract_sparse, blocks(m), x, x, *own, f32(factor), len(x), m, BLOCK=BLOCK)
    elif not isinstance(own, Sparse) and factor != 1.0 and plain(x, own):
        launch(kernels.subtract, blocks(len(x)), x, x, own, f32(factor), len(x), BLOCK=BLOCK)
    else:
        general.subtract(x, own, factor)


def zero_where(x: Array, own: Array | Sparse) -> None:
    if plain(x) and plain_sparse(own):
        m = len(own.index)
        launch(kernels.zero_where_sparse, blocks(m), x, x, *own, len(x), m, BLOCK=BLOCK)
    elif not isinstance(own, Sparse) and plain(x, own):
        launch(kernels.zero_where, blocks(len(x)), x, x, own, len(x), BLOCK=BLOCK)
    else:
        general.zero_where(x, own)


def write(out: Array, total: Array | Sparse | Half, factor: float, cleared: bool = False) -> None:
    n = len(out)
    if not out.is_contiguous():
        general.write(out, total, factor, cleared)
    elif plain_sparse(total):
        if not cleared:
            out.zero_()
        index, order = torch.sort(torch.where(total.values != 0, total.index, n), stable=True)  # zeros add nothing
        given = out, index, order, total.values, f32(factor), n, len(index)
        launch(kernels.write_runs, blocks(len(index)), out, *given, BLOCK=BLOCK)
    elif isinstance(total, Half) and plain(total.values, dtype=torch.float16) and len(total.values) == n:
        launch(kernels.write_half, blocks(n), out, out, total.values, f32(total.scale), f32(factor), n, BLOCK=BLOCK)
    elif not isinstance(total, Half | Sparse) and factor != 1.0 and plain(total) and len(total) == n:
        launch(kernels.write, blocks(n), out, out, total, f32(factor), n, BLOCK=BLOCK)
    else:
        general.write(out, total, factor, cleared)
