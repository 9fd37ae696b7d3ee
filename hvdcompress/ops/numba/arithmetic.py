"""Arithmetic, compiled: add, subtract and write dense and sparse vectors (see :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

import ctypes

import numpy as np

from hvdcompress.ops import numpy as reference
from hvdcompress.ops.numba._kernels import arithmetic as kernels
from hvdcompress.ops.numba._kernels import floats
from hvdcompress.ops.numba.arrays import INF_BITS, int64, magnitude_bits, plain, plain_sparse
from hvdcompress.ops.numba.selection import chunk_argmax, first_above
from hvdcompress.ops.numba.statistics import all_finite, moments
from hvdcompress.ops.shared import Finders, find, index_dtype, moments_of
from hvdcompress.ops.spec import NOTHING, Found, Half, Scan, Sparse
from hvdcompress.ops.spec import NumpyArray as Array

FINDERS = Finders(all_finite, moments, chunk_argmax, first_above)


def accumulate(
    gradient: Array, residual: Array, scale: float, out: Array, scan: Scan = NOTHING, clear: bool = False
) -> Found:
    if not plain(gradient, residual, out):
        return reference.accumulate(gradient, residual, scale, out, scan, clear)
    above = scan.above
    if (above is not None and above < 0) or (scan.chunk and (above is not None or scan.moments)):  # rare
        accumulate(gradient, residual, scale, out, clear=clear)
        return find(out, scan, FINDERS)
    factor, bits = np.float32(scale), out.view(np.int32)
    if scan.chunk:
        offsets = np.empty(-(-out.size // scan.chunk), np.int32)
        most = kernels.accumulate_argmax(gradient, residual, factor, out, bits, scan.chunk, offsets, clear)
        return Found(True, offsets=offsets) if most < INF_BITS else Found(False)
    low = kernels.MAGNITUDE if above is None else magnitude_bits(above)
    room = (0 if above is None else min(scan.capacity, out.size)) + 1  # one more, for what is one too many
    index, values = np.empty(room, index_dtype(out.size)), np.empty(room, np.float32)
    sums = np.zeros((2, kernels.LANES if scan.moments else 0))
    most, count = kernels.accumulate(gradient, residual, factor, out, bits, clear, sums, low, index, values)
    if most >= INF_BITS:
        return Found(False)
    return Found(
        True,
        moments_of(sums[0].sum(), sums[1].sum(), out.size) if scan.moments else None,
        above=Sparse(index[:count], values[:count]) if above is not None and count < scan.capacity else None,
    )


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
