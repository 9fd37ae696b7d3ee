"""Arithmetic in Triton: add, subtract and write dense and sparse tensors (see :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import torch

from hvdcompress.ops import torch as general
from hvdcompress.ops.scan import NOTHING, Found, Scan, Span, Velocity
from hvdcompress.ops.shared import (
    Decoders,
    Finders,
    accumulate_pieces,
    decoded,
    end_to_end,
    find,
    find_rest,
    matmul_transposed,
    moments_of,
)
from hvdcompress.ops.torch import add_all, bucket_norms, concat, max_abs, scaled, unpack_fields
from hvdcompress.ops.torch.arithmetic import write_then_copy
from hvdcompress.ops.torch.spectra import inverse
from hvdcompress.ops.torch.tensors import f32, flag, host
from hvdcompress.ops.triton._kernels import arithmetic as kernels
from hvdcompress.ops.triton._kernels.launching import BLOCK, blocks, launch
from hvdcompress.ops.triton.codes import dequantize, pack_signs, unpack_signs
from hvdcompress.ops.triton.floats import from_bf16, from_fp16, to_fp16
from hvdcompress.ops.triton.levels import decode_levels
from hvdcompress.ops.triton.selection import chunk_argmax, compacted, first_above, tile
from hvdcompress.ops.triton.statistics import all_finite, finite_flag, moments
from hvdcompress.ops.triton.tensors import empty, plain, plain_sparse
from hvdcompress.ops.vectors import Array, Coded, Flag, Half, Scalar, Shares, Sparse

FINDERS = Finders(
    all_finite, moments, chunk_argmax, first_above, pack_signs, bucket_norms, max_abs, matmul_transposed, to_fp16
)
DECODERS = Decoders(
    from_fp16, from_bf16, dequantize, unpack_signs, decode_levels, unpack_fields, inverse, scaled, add_all, concat
)


def accumulate(
    gradient: Array,
    residual: Array,
    scale: float,
    out: Array,
    scan: Scan = NOTHING,
    velocity: Velocity | None = None,
) -> Found:
    if not plain(gradient, residual, out) or velocity is not None:
        return general.accumulate(gradient, residual, scale, out, scan, velocity)
    given = gradient, residual, scale, out
    if scan == Scan(moments=True):
        return _moments(*given)
    if scan.chunk and scan == Scan(chunk=scan.chunk) and (shape := tile(scan.chunk)):
        return _argmax(*given, scan.chunk, shape)
    if scan.above is not None and scan == Scan(above=scan.above, capacity=scan.capacity):
        return _above(*given, scan.above, scan.capacity)
    n = len(out)
    finite = finite_flag(out)
    launch(
        kernels.accumulate, blocks(n), out,
        gradient, residual, f32(scale), out, finite, n, BLOCK=BLOCK,
    )  # fmt: skip
    return find_rest(out, flag(finite), scan, FINDERS)


def accumulate_parts(
    gradients: Sequence[Array],
    residual: Array,
    scales: Sequence[float],
    out: Array,
    spans: Sequence[Span],
    scans: Sequence[Scan],
    velocity: Velocity | None = None,
) -> list[Found]:
    return accumulate_pieces(accumulate, gradients, residual, scales, out, spans, scans, velocity)


def inspect(x: Array, scan: Scan) -> Found:
    return find(x, scan, FINDERS)


def _moments(gradient: Array, residual: Array, scale: float, out: Array) -> Found:
    n = len(out)
    sums = empty(2 * blocks(n), torch.float64, out)
    launch(
        kernels.accumulate_moments, blocks(n), out,
        gradient, residual, f32(scale), out, sums, n, BLOCK=BLOCK,
    )  # fmt: skip
    total, squares = host(sums.view(-1, 2).sum(0))
    return Found(True, moments_of(total, squares, n)) if isfinite(squares) else Found(False)


def _argmax(gradient: Array, residual: Array, scale: float, out: Array, chunk: int, shape: dict[str, int]) -> Found:
    n = len(out)
    finite = finite_flag(out)
    offset = empty(-(-n // chunk), torch.int32, out)
    launch(
        kernels.accumulate_argmax, blocks(len(offset), shape["ROWS"]), out,
        gradient, residual, f32(scale), out, finite, offset, n, chunk, len(offset), **shape,
    )  # fmt: skip
    known = flag(finite)
    return Found(False) if known is False else Found(known, offsets=offset)


def _above(gradient: Array, residual: Array, scale: float, out: Array, threshold: Scalar, capacity: int) -> Found:
    n = len(out)
    finite = finite_flag(out)
    counts = empty(blocks(n), torch.int32, out)
    launch(
        kernels.accumulate_count, blocks(n), out,
        gradient, residual, f32(scale), out, finite, f32(threshold), counts, n, BLOCK=BLOCK,
    )  # fmt: skip
    ends = counts.cumsum(0)
    known, found = host(torch.cat([finite, ends[-1:]]))
    if known != 1 or found >= capacity:
        return Found(known == 1)
    values = empty(found, torch.float32, out)
    return Found(True, above=Sparse(compacted(out, threshold, ends, found, values=values), values))


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


def dense(x: Array | Coded) -> Array:
    return decoded(x, DECODERS)


def subtract(x: Array, own: Array | Sparse | Coded, factor: float) -> None:
    own = dense(own) if isinstance(own, Coded) else own
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


def write_parts(outs: Sequence[Array], total: Array | Sparse | Shares | Coded, factor: float) -> None:
    write_then_copy(outs, total, factor, write)


def write(out: Array, total: Array | Sparse | Shares | Coded, factor: float) -> None:
    n = len(out)
    if isinstance(total, Half) and plain(total.values, dtype=torch.float16) and total.size == n and out.is_contiguous():
        launch(kernels.write_half, blocks(n), out, out, total.values, f32(total.scale), f32(factor), n, BLOCK=BLOCK)
        return
    total = end_to_end(total, concat) if isinstance(total, Shares) else dense(total)
    if not out.is_contiguous():
        general.write(out, total, factor)
    elif plain_sparse(total):
        out.zero_()
        index, order = torch.sort(torch.where(total.values != 0, total.index, n), stable=True)  # zeros add nothing
        given = out, index, order, total.values, f32(factor), n, len(index)
        launch(kernels.write_runs, blocks(len(index)), out, *given, BLOCK=BLOCK)
    elif not isinstance(total, Sparse) and factor != 1.0 and plain(total) and len(total) == n:
        launch(kernels.write, blocks(n), out, out, total, f32(factor), n, BLOCK=BLOCK)
    else:
        general.write(out, total, factor)
