"""Arithmetic: add, subtract and write dense and sparse vectors (documented in :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdcompress.ops.numpy.codes import dequantize, pack_signs, unpack_fields, unpack_signs
from hvdcompress.ops.numpy.floats import from_bf16, from_fp16, to_fp16
from hvdcompress.ops.numpy.levels import decode_levels
from hvdcompress.ops.numpy.memory import concat
from hvdcompress.ops.numpy.selection import chunk_argmax, first_above
from hvdcompress.ops.numpy.spectra import inverse
from hvdcompress.ops.numpy.statistics import all_finite, bucket_norms, max_abs, moments
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
    write_pieces,
)
from hvdcompress.ops.vectors import FP32_MAX, Coded, Shares, Sparse
from hvdcompress.ops.vectors import NumpyArray as Array

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
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = gradient if scale == 1.0 else gradient * np.float32(scale)
            np.multiply(velocity.old, np.float32(velocity.momentum), out=velocity.new)
            velocity.new[...] += scaled
        return accumulate(velocity.new, residual, 1.0, out, scan)
    with np.errstate(over="ignore", invalid="ignore"):  # Found.finite reports NaN and Inf
        if scale == 1.0:
            np.add(gradient, residual, out=out)
        else:
            np.multiply(gradient, np.float32(scale), out=out)
            out += residual
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


def keep_if(finite: bool, x: Array, other: Array | None = None) -> None:
    if not finite:
        x[...] = 0 if other is None else other


def blend(x: Array, residual: Array, beta: float) -> None:
    x *= np.float32(beta)
    x += np.float32(1.0 - beta) * residual


def subtract(x: Array, own: Array | Sparse | Coded, factor: float) -> None:
    f = np.float32(factor)
    if isinstance(own, Coded):
        own = dense(own)
    if isinstance(own, Sparse):
        np.subtract.at(x, own.index, f * own.values)
    else:
        np.subtract(x, own if f == 1 else f * own, out=x)


def zero_where(x: Array, own: Array | Sparse) -> None:
    if isinstance(own, Sparse):
        x[own.index[own.values != 0]] = 0
    else:
        x[own != 0] = 0


def write(out: Array, total: Array | Sparse | Shares | Coded, factor: float) -> None:
    if isinstance(total, Coded):
        total = dense(total)
    if isinstance(total, Shares):
        total = end_to_end(total, concat)
    if isinstance(total, Sparse):
        out[...] = 0
        np.add.at(out, total.index, (total.values * np.float32(factor)).astype(out.dtype, copy=False))
    elif factor == 1.0:
        out[...] = total
    else:
        np.multiply(total, total.dtype.type(factor), out=out, casting="same_kind")


def dense(x: Array | Coded) -> Array:
    return decoded(x, DECODERS)


def write_parts(outs: Sequence[Array], total: Array | Sparse | Shares | Coded, factor: float) -> None:
    write_pieces(outs, total, factor, write)


def add_all(arrays: list[Array], into_first: bool = False) -> Array:
    total = arrays[0] if into_first else arrays[0].copy()
    for array in arrays[1:]:
        total += array
    return total


def merge(a: Sparse, b: Sparse, n: int) -> Sparse:
    index, inverse = np.unique(np.concatenate([a.index, b.index]), return_inverse=True)
    values = np.zeros(index.size, np.float32)
    np.add.at(values, inverse, np.concatenate([a.values, b.values]))
    return Sparse(index.astype(index_dtype(n)), values)


def scaled(x: Array, factor: float, limit: float = FP32_MAX) -> Array:
    with np.errstate(over="ignore"):  # Inf is clipped below
        out = x * np.float32(factor)
    return np.clip(out, -np.float32(limit), np.float32(limit), out=out)


DECODERS = Decoders(
    from_fp16, from_bf16, dequantize, unpack_signs, decode_levels, unpack_fields, inverse, scaled, add_all, concat
)
