"""Arithmetic, compiled: add, subtract and write dense and sparse vectors (see :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from hvdcompress.ops import numpy as reference
from hvdcompress.ops.numba import coded
from hvdcompress.ops.numba._kernels import arithmetic as kernels
from hvdcompress.ops.numba.arrays import INF_BITS, int64, magnitude_bits, plain, plain_sparse
from hvdcompress.ops.numpy.statistics import fold, norms_of
from hvdcompress.ops.shared import PIECE, index_dtype, moments_of
from hvdcompress.ops.spec import Coded, Joined, Scalar, Sparse, size_of
from hvdcompress.ops.spec import NumpyArray as Array


def accumulate(gradient: Array, residual: Array, scale: float, out: Array, clear: bool = False) -> bool:
    if not plain(gradient, residual, out):
        return reference.accumulate(gradient, residual, scale, out, clear)
    zeros = np.zeros(kernels.LANES, np.float32)
    kernels.accumulate(gradient, residual, np.float32(scale), out, zeros, clear)
    return bool(np.isfinite(zeros.sum()))


def accumulate_moments(
    gradient: Array, residual: Array, scale: float, out: Array, clear: bool = False
) -> tuple[float, float]:
    if not plain(gradient, residual, out):
        return reference.accumulate_moments(gradient, residual, scale, out, clear)
    total, squares = np.zeros(kernels.LANES), np.zeros(kernels.LANES)
    kernels.accumulate_moments(gradient, residual, np.float32(scale), out, total, squares, clear)
    if not np.isfinite(squares).all():
        return np.nan, np.nan
    return moments_of(total.sum(), squares.sum(), out.size)


def accumulate_argmax(
    gradient: Array, residual: Array, scale: float, out: Array, chunk: int, clear: bool = False
) -> tuple[bool, Array]:
    if not plain(gradient, residual, out):
        return reference.accumulate_argmax(gradient, residual, scale, out, chunk, clear)
    offset = np.empty(-(-out.size // chunk), np.int32)
    bits = out.view(np.int32)
    return kernels.accumulate_argmax(
        gradient, residual, np.float32(scale), out, bits, chunk, offset, clear
    ) < INF_BITS, offset


def accumulate_above(
    gradient: Array,
    residual: Array,
    scale: float,
    out: Array,
    threshold: Scalar,
    capacity: int,
    clear: bool = False,
) -> tuple[bool, Sparse]:
    if not plain(gradient, residual, out) or threshold < 0:
        return reference.accumulate_above(gradient, residual, scale, out, threshold, capacity, clear)
    room = min(capacity, out.size) + 1
    index, values = np.empty(room, index_dtype(out.size)), np.empty(room, np.float32)
    low, bits = magnitude_bits(threshold), out.view(np.int32)
    found, most = kernels.accumulate_above(gradient, residual, np.float32(scale), out, bits, low, index, values, clear)
    return most < INF_BITS, Sparse(index[:found], values[:found])


def accumulate_signs(
    gradient: Array, residual: Array, scale: float, out: Array, signs: Array, clear: bool = False
) -> tuple[bool, Array]:
    fits = out.size > PIECE and plain(signs, dtype=np.uint8) and signs.size == -(-out.size // 8)
    if not fits or not plain(gradient, residual, out):
        return reference.accumulate_signs(gradient, residual, scale, out, signs, clear)
    sums = np.empty((1, -(-out.size // PIECE)))
    kernels.accumulate_signs(gradient, residual, np.float32(scale), out, sums[0], signs, clear)
    total = fold(sums)
    return bool(np.isfinite(total[0])), norms_of(total, out.size, out.size, "mean")


def blend(x: Array, residual: Array, beta: float) -> None:
    if not plain(x, residual):
        return reference.blend(x, residual, beta)
    return kernels.blend(x, residual, np.float32(beta), np.float32(1.0 - beta))


def subtract(x: Array, own: Array | Sparse | Coded, factor: float) -> None:
    if isinstance(own, Joined):
        for part, piece in _pieces(x, own):
            subtract(part, piece, factor)
    elif isinstance(own, Coded):
        if factor != 1.0 or not coded.subtract(x, own):
            reference.subtract(x, own, factor)
    elif plain_sparse(own, x):
        kernels.add_at(x, int64(own.index), own.values, -np.float32(factor))  # x − v and x + (−v) are the same float
    elif not isinstance(own, Sparse) and factor != 1.0 and plain(x, own):
        kernels.subtract(x, own, np.float32(factor))
    else:
        reference.subtract(x, own, factor)


def write(out: Array, total: Array | Sparse | Coded, factor: float, cleared: bool = False) -> None:
    if isinstance(total, Joined):
        for part, piece in _pieces(out, total):
            write(part, piece, factor)
    elif isinstance(total, Coded):
        if not coded.write(out, total, factor):
            reference.write(out, total, factor)
    elif plain_sparse(total, out):
        if not cleared:
            ctypes.memset(out.ctypes.data, 0, out.nbytes)  # 2/3 of fill's time: it need not read what it overwrites
        kernels.add_at(out, int64(total.index), total.values, np.float32(factor))
    else:
        reference.write(out, total, factor, cleared)


def dense(x: Array | Coded) -> Array:
    if not isinstance(x, Coded):
        return x
    out = np.empty(x.size, np.float32)
    write(out, x, 1.0)
    return out


def _pieces(x: Array, joined: Joined) -> list[tuple[Array, Any]]:
    """Pair the parts of a joined vector with the parts of ``x`` where they belong."""
    stops = np.cumsum([size_of(part) for part in joined.parts]).tolist()
    if stops[-1] != x.size:
        raise ValueError(f"parts of {stops[-1]} elements do not fill {x.size}")
    return [(x[stop - size_of(part) : stop], part) for part, stop in zip(joined.parts, stops, strict=True)]
