"""Arithmetic, compiled: add, subtract and write dense and sparse vectors (see :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

import ctypes

import numpy as np

from hvdcompress.ops import numpy as reference
from hvdcompress.ops.numba._kernels import arithmetic as kernels
from hvdcompress.ops.numba._kernels import floats, matrices
from hvdcompress.ops.numba.arrays import INF_BITS, in_rows, int64, magnitude_bits, plain, plain_outer, plain_sparse
from hvdcompress.ops.numba.matrices import matmul_transposed
from hvdcompress.ops.numba.spectra import write_waves
from hvdcompress.ops.shared import index_dtype, moments_of
from hvdcompress.ops.spec import FP32_MAX, Half, Outer, Scalar, Sparse, Waves
from hvdcompress.ops.spec import NumpyArray as Array

FEW, LARGE = range(1, 9), 1 << 22  #: rows and elements for which one pass is faster than two: others stay in the cache


def accumulate(gradient: Array, residual: Array, scale: float, out: Array, clear: bool = False) -> bool:
    if not plain(gradient, residual, out):
        return reference.accumulate(gradient, residual, scale, out, clear)
    return kernels.accumulate(gradient, residual, np.float32(scale), out, out.view(np.int32), clear) < INF_BITS


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


def accumulate_products(
    gradient: Array, residual: Array, scale: float, out: Array, a: Array, rows: int, clear: bool = False
) -> tuple[bool, Array]:
    columns = out.size * rows // a.size
    if out.size < LARGE or rows not in FEW or not (plain(gradient, residual, out) and plain(a)):
        finite = accumulate(gradient, residual, scale, out, clear)
        return finite, matmul_transposed(a, out, rows, columns) if finite else np.zeros(rows * columns, np.float32)
    found, bits = np.empty((rows, columns), np.float32), out.view(np.int32)
    most = matrices.accumulate_products(
        gradient, residual, np.float32(scale), out, bits, a.reshape(rows, -1), found, clear
    )
    return most < INF_BITS, found.ravel()


def blend(x: Array, residual: Array, beta: float) -> None:
    if not plain(x, residual):
        return reference.blend(x, residual, beta)
    return kernels.blend(x, residual, np.float32(beta), np.float32(1.0 - beta))


def subtract(x: Array, own: Array | Sparse | Outer | Waves, factor: float) -> None:
    if plain_outer(own, x, factor):
        matrices.outer(*in_rows(own, x), np.float32(own.scale * factor), True)
    elif isinstance(own, Waves) and plain(x):
        write_waves(own, factor, x, subtract=True)
    elif plain_sparse(own, x):
        kernels.add_at(x, int64(own.index), own.values, -np.float32(factor))  # x − v and x + (−v) are the same float
    elif not isinstance(own, Sparse | Outer | Waves) and factor != 1.0 and plain(x, own):
        kernels.subtract(x, own, np.float32(factor))
    else:
        reference.subtract(x, own, factor)


def write(out: Array, total: Array | Sparse | Half | Outer | Waves, factor: float, cleared: bool = False) -> None:
    if plain_outer(total, out, factor):
        matrices.outer(*in_rows(total, out), np.float32(total.scale * factor), False)
        return
    if isinstance(total, Waves) and plain(out):
        write_waves(total, factor, out, subtract=False)
        return
    if (
        isinstance(total, Half)
        and plain(total.values, dtype=np.float16)
        and plain(out)
        and out.size == total.values.size
    ):
        bits = out.view(np.uint32)
        floats.from_fp16(total.values.view(np.uint16), np.float32(total.scale), np.float32(factor), out, bits)
        return
    if plain_sparse(total, out):
        if not cleared:
            ctypes.memset(out.ctypes.data, 0, out.nbytes)  # 2/3 of fill's time: it need not read what it overwrites
        kernels.add_at(out, int64(total.index), total.values, np.float32(factor))
    else:
        reference.write(out, total, factor, cleared)


def scaled(x: Array, factor: float, limit: float = FP32_MAX) -> Array:
    if not plain(x):
        return reference.scaled(x, factor, limit)
    out = np.empty(x.size, np.float32)
    kernels.scaled(x, np.float32(factor), np.float32(limit), out)
    return out
