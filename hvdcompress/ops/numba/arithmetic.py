"""Arithmetic, compiled: add, subtract and write dense and sparse vectors (see :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from hvdcompress.ops import numpy as reference
from hvdcompress.ops.numba._kernels import arithmetic as kernels
from hvdcompress.ops.numba._kernels import floats
from hvdcompress.ops.numba.arrays import INF_BITS, int64, magnitude_bits, plain, plain_sparse
from hvdcompress.ops.numba.selection import chunk_argmax, first_above
from hvdcompress.ops.numba.statistics import all_finite, moments
from hvdcompress.ops.shared import Finders, find, index_dtype, moments_of
from hvdcompress.ops.spec import NOTHING, Found, Half, Scan, Sparse, Velocity
from hvdcompress.ops.spec import NumpyArray as Array

FINDERS = Finders(all_finite, moments, chunk_argmax, first_above)


def accumulate(
    gradient: Array,
    residual: Array,
    scale: float,
    out: Array,
    scan: Scan = NOTHING,
    clear: bool = False,
    velocity: Velocity | None = None,
) -> Found:
    if not plain(gradient, residual, out, *(velocity or ())[:2]):
        return reference.accumulate(gradient, residual, scale, out, scan, clear, velocity)
    if (
        (scan.above is not None and scan.above < 0)
        or (scan.chunk and (scan.above is not None or scan.moments))
        or (velocity is not None and (scan.chunk or scan.moments))
    ):  # rare
        if not accumulate(gradient, residual, scale, out, NOTHING, clear, velocity).finite:
            return Found(False)
        return find(out, scan, FINDERS)
    passed = gradient, residual, np.float32(scale), out, clear
    if scan.chunk:
        offsets = np.empty(-(-out.size // scan.chunk), np.int32)
        most = kernels.accumulate_argmax(*passed, scan.chunk, offsets)
        return Found(True, offsets=offsets) if most < INF_BITS else Found(False)
    if not scan.moments and scan.above is None and velocity is None:
        return Found(kernels.accumulate(*passed) < INF_BITS)
    low, room = kernels.MAGNITUDE, 0
    if scan.above is not None:
        low, room = magnitude_bits(scan.above), min(scan.capacity, out.size)
    index, values = np.empty(room, index_dtype(out.size)), np.empty(room, np.float32)
    found: dict[str, Any] = {}
    if velocity is not None:
        old, new, momentum = velocity
        most, count = kernels.accumulate_velocity(*passed, low, index, values, old, new, np.float32(momentum))
    elif scan.moments:
        total, squares = np.zeros(kernels.LANES), np.zeros(kernels.LANES)
        most, count = kernels.accumulate_moments(*passed, low, index, values, total, squares)
        found["moments"] = moments_of(total.sum(), squares.sum(), out.size)
    else:
        most, count = kernels.accumulate_above(*passed, low, index, values)
    if scan.above is not None and count < scan.capacity:
        found["above"] = Sparse(index[:count], values[:count])
    return Found(True, **found) if most < INF_BITS else Found(False)


def blend(x: Array, residual: Array, beta: float) -> None:
    if not plain(x, residual):
        return reference.blend(x, residual, beta)
    return kernels.blend(x, residual, np.float32(beta), np.float32(1.0 - beta))


def subtract(x: Array, own: Array | Sparse, factor: float) -> None:
    if plain_sparse(own, x):
        kernels.add_at(x, int64(own.index), own.values, -np.float32(factor))  # x − v and x + (−v) are the same float
    elif not isinstance(own, Sparse) and factor != 1.0 and plain(x, own):
        kernels.subtract(x, own, np.float32(factor))
    else:
        reference.subtract(x, own, factor)


def zero_where(x: Array, own: Array | Sparse) -> None:
    if plain_sparse(own, x):
        kernels.zero_at(x, int64(own.index), own.values)
    else:
        reference.zero_where(x, own)


def merge(a: Sparse, b: Sparse, n: int) -> Sparse:
    if plain(a.values) and plain(b.values) and a.index.size == a.values.size and b.index.size == b.values.size:
        index = np.empty(a.index.size + b.index.size, index_dtype(n))
        values = np.empty(index.size, np.float32)
        found = kernels.merge(int64(a.index), a.values, int64(b.index), b.values, index, values)
        if found >= 0:
            return Sparse(index[:found], values[:found])
    return reference.merge(a, b, n)


def write(out: Array, total: Array | Sparse | Half, factor: float, cleared: bool = False) -> None:
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
