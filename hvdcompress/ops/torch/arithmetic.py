"""Arithmetic: add, subtract and write dense and sparse tensors (documented in :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hvdcompress.ops.scan import NOTHING, Found, Scan, Span, Velocity
from hvdcompress.ops.shared import (
    Decoders,
    Finders,
    accumulate_pieces,
    decoded,
    end_to_end,
    find,
    index_dtype,
    matmul_transposed,
)
from hvdcompress.ops.torch.codes import dequantize, pack_signs, unpack_fields, unpack_signs
from hvdcompress.ops.torch.floats import from_bf16, from_fp16, to_fp16
from hvdcompress.ops.torch.levels import decode_levels
from hvdcompress.ops.torch.memory import concat, zeros
from hvdcompress.ops.torch.selection import chunk_argmax, first_above
from hvdcompress.ops.torch.spectra import inverse
from hvdcompress.ops.torch.statistics import all_finite, bucket_norms, max_abs, moments
from hvdcompress.ops.torch.tensors import dtype_of, f32, host
from hvdcompress.ops.vectors import (
    FP32_MAX,
    Array,
    Coded,
    Flag,
    Shares,
    Sparse,
)

FINDERS = Finders(
    all_finite, moments, chunk_argmax, first_above, pack_signs, bucket_norms, max_abs, matmul_transposed, to_fp16
)


def accumulate(
    gradient: Array,
    residual: Array,
    scale: float,
    out: Array,
    scan: Scan = NOTHING,
    velocity: Velocity | None = None,
) -> Found:
    if velocity is not None:
        scaled = gradient if scale == 1.0 else gradient * f32(scale)
        torch.mul(velocity.old, f32(velocity.momentum), out=velocity.new).add_(scaled)
        return accumulate(velocity.new, residual, 1.0, out, scan)
    if scale == 1.0:
        torch.add(gradient, residual, out=out)
    else:  # two steps, because add(alpha=) may fuse them and round once where the reference rounds twice
        torch.mul(gradient, f32(scale), out=out).add_(residual)
    return inspect(out, scan)


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


def keep_if(finite: Flag, x: Array, other: Array | None = None) -> None:
    if not isinstance(finite, bool):
        x.copy_(torch.where(finite != 0, x, 0.0 if other is None else other))
    elif not finite:
        x.copy_(other) if other is not None else x.zero_()


def blend(x: Array, residual: Array, beta: float) -> None:
    x.mul_(f32(beta)).add_(residual * f32(1.0 - beta))


def subtract(x: Array, own: Array | Sparse | Coded, factor: float) -> None:
    if isinstance(own, Coded):
        own = dense(own)
    if isinstance(own, Sparse):
        _add_with_zeros(x, own.index, own.values * -f32(factor))
    else:
        x.sub_(own if factor == 1.0 else own * f32(factor))


def zero_where(x: Array, own: Array | Sparse) -> None:
    if isinstance(own, Sparse):
        index = own.index[own.values != 0]
        x[index.to(torch.int64)] = 0
    else:
        x[own != 0] = 0


def write(out: Array, total: Array | Sparse | Shares | Coded, factor: float) -> None:
    if isinstance(total, Coded):
        total = dense(total)
    if isinstance(total, Shares):
        total = end_to_end(total, concat)
    if isinstance(total, Sparse):
        out.zero_()
        _add_in_order(out, total.index, (total.values * f32(factor)).to(out.dtype))
    else:
        out.copy_(total if factor == 1.0 else total * (factor if total.dtype == torch.float64 else f32(factor)))


def _add_in_order(out: Array, index: Array, values: Array) -> None:
    """Add values to ``out``; values with equal indices are added in their order.

    A GPU adds duplicates in an undefined order, and float sums depend on the order. So the values are added in rounds
    in which each index occurs once: first the first occurrences, then the second ones, and so on; at most as many
    rounds as ranks. Zeros are left out.
    """
    if host((index[1:] > index[:-1]).all()):
        _add_at(out, index, values)
        return
    index, order = torch.sort(index, stable=True)
    values = values[order]
    counts = (values != 0).long()
    before = counts.cumsum(0) - counts  # number of non-zero values before this one, of all indices
    begins = torch.cat([zeros(1, "bool", like=index), index[1:] != index[:-1]])
    turn = before - torch.where(begins, before, 0).cummax(0).values  # the same, of this index only: the round
    turn, order = torch.sort((turn + 1) * counts, stable=True)  # zeros get round 0
    zeros_first, *sizes = host(torch.bincount(turn))
    for now in order[zeros_first:].split(sizes):
        _add_at(out, index[now], values[now])


def _add_at(out: Array, index: Array, values: Array) -> None:
    """Add values at distinct indices.

    ``index_add_`` is not used: on a GPU it adds atomically, and atomic additions treat denormals as zeros
    (https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-red).
    """
    index = index.long()
    out[index] = out[index] + values


def _add_with_zeros(out: Array, index: Array, values: Array) -> None:
    """As :func:`_add_at`, if the indices may have duplicates with the value ±0. The host does not wait."""
    if not len(index):
        return
    index = index.long()
    total = out[index] + values
    for chosen in (values == 0, values != 0):  # non-zero values last, so that no zero overwrites them
        first = chosen.to(torch.uint8).argmax().view(1)  # entries that are not chosen write the first chosen one again
        out[torch.where(chosen, index, index[first])] = torch.where(chosen, total, total[first])


def dense(x: Array | Coded) -> Array:
    return decoded(x, DECODERS)


def write_parts(outs: Sequence[Array], total: Array | Sparse | Shares | Coded, factor: float) -> None:
    write_then_copy(outs, total, factor, write)


def write_then_copy(
    outs: Sequence[Array],
    total: Array | Sparse | Shares | Coded,
    factor: float,
    write: Callable[[Array, Array | Sparse | Shares | Coded, float], None],
) -> None:
    """Write one vector and copy it to its parts: on a GPU, two calls are faster than two calls per part."""
    whole = outs[0].new_empty(sum(map(len, outs)))
    write(whole, total, factor)
    torch._foreach_copy_(list(outs), list(whole.split([len(out) for out in outs])))


def add_all(arrays: list[Array], into_first: bool = False) -> Array:
    total = arrays[0] if into_first else arrays[0].clone()
    for array in arrays[1:]:
        total += array
    return total


def merge(a: Sparse, b: Sparse, n: int) -> Sparse:
    index, inverse = torch.unique(torch.cat([a.index, b.index]), return_inverse=True)
    values = torch.zeros(len(index), dtype=torch.float32, device=index.device)
    for at, each in zip(inverse.split([len(a.index), len(b.index)]), (a.values, b.values), strict=True):
        _add_at(values, at, each)
    return Sparse(index.to(dtype_of(index_dtype(n))), values)


def scaled(x: Array, factor: float, limit: float = FP32_MAX) -> Array:
    return (x * f32(factor)).clamp_(-f32(limit), f32(limit))


DECODERS = Decoders(
    from_fp16, from_bf16, dequantize, unpack_signs, decode_levels, unpack_fields, inverse, scaled, add_all, concat
)
