"""Arithmetic, compiled: add, subtract and write dense and sparse vectors (see :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdcompress.ops import pool
from hvdcompress.ops.numba import coded
from hvdcompress.ops.numba._kernels import arithmetic as kernels
from hvdcompress.ops.numba._kernels import matrices
from hvdcompress.ops.numba.arrays import (
    FLOAT32,
    INF_BITS,
    addresses,
    as_matrices,
    is_plain_sparse,
    magnitude_bits,
    plain,
    plain_outer,
    plain_sparse,
)
from hvdcompress.ops.numba.floats import clipped_to_fp16
from hvdcompress.ops.numba.memory import joined
from hvdcompress.ops.numba.spectra import write_spectra
from hvdcompress.ops.numba.threads import MIN_RANGE, count, in_ranges
from hvdcompress.ops.numpy import NumpyOps
from hvdcompress.ops.scan import NOTHING, Found, Product, Scan, Span, Velocity
from hvdcompress.ops.shared import index_dtype
from hvdcompress.ops.vectors import FP16_MAX, FP32_MAX, Coded, Joined, Outer, Shares, Sparse, Spectra, piece_of, size_of
from hvdcompress.ops.vectors import NumpyArray as Array

FEW_ROWS = range(1, 9)  #: row counts for which the product is computed in the pass that accumulates
LARGE = 1 << 22  #: number of elements from which one pass is faster than two; smaller vectors stay in the cache
MIDDLE = 1 << 18  #: the same if the pass also removes the projection, which saves another pass


def _multiplies_in_pass(request: Product, n: int) -> bool:
    """Return whether to compute a product with n elements in the pass that accumulates them."""
    return plain(request.a) and request.rows in FEW_ROWS and n >= (MIDDLE if request.remove else LARGE)


def _accumulate_with_product(
    gradient: Array, residual: Array, scale: np.float32, out: Array, request: Product
) -> Found:
    """Accumulate, multiply, and remove the projection if requested, in one pass."""
    rows = request.rows
    width = request.a.size // rows
    room = 4 if rows <= 4 else 8
    kernel = matrices.accumulate_few_products if rows <= 4 else matrices.accumulate_eight_products
    a = np.zeros((room, width), np.float32)
    product = np.empty((room, out.size // width), np.float32)
    a[:rows] = request.a.reshape(rows, width)
    most = kernel(gradient, residual, scale, out, a, product, np.float32(request.remove))
    if most >= INF_BITS:
        return Found(False)
    return Found(True, product=product[:rows].ravel(), removed=request.remove != 0)


def _fit_one_kernel(
    gradients: Sequence[Array], residual: Array, out: Array, spans: Sequence[Span], scans: Sequence[Scan]
) -> bool:
    """Return whether one kernel call can accumulate all: only ``above`` is requested, and no gradient needs threads."""
    most = 2 * MIN_RANGE if count() > 1 else 1 << 31
    for gradient, (start, stop), scan in zip(gradients, spans, scans, strict=True):
        if gradient.dtype != FLOAT32 or not gradient.flags.carray or not gradient.size == stop - start < most:
            return False
        if scan.chunk or scan.product or scan.halves or (scan.above is not None and scan.above < 0):
            return False
    return plain(residual, out)


#: (start, stop) -> the first four arguments of a kernel that accumulates these elements
Operands = Callable[[int, int], tuple[Any, ...]]


def _in_one_pass(
    gradient: Array,
    residual: Array,
    scale: np.float32,
    out: Array,
    scan: Scan,
    velocity: Velocity | None,
) -> Found:
    """Accumulate and compute what ``scan`` requests in one pass, on this rank's cores."""
    n = out.size

    def operands(start: int, stop: int) -> tuple[Any, ...]:
        if stop - start == n:
            return gradient, residual, scale, out
        return gradient[start:stop], residual[start:stop], scale, out[start:stop]

    if scan.chunk:
        return _accumulate_argmax(operands, n, scan.chunk)
    if scan.above is not None or velocity is not None:
        return _accumulate_and_collect(operands, n, scan, velocity)
    most = max(in_ranges(lambda start, stop: kernels.accumulate(*operands(start, stop)), n, kernels.BLOCK))
    return Found(most < INF_BITS)


def _accumulate_argmax(operands: Operands, n: int, chunk: int) -> Found:
    offsets = pool.empty(-(-n // chunk), np.int32)

    def accumulate_range(start: int, stop: int) -> int:
        return kernels.accumulate_argmax(*operands(start, stop), chunk, offsets[start // chunk : -(-stop // chunk)])

    most = max(in_ranges(accumulate_range, n, chunk))
    return Found(True, offsets=offsets) if most < INF_BITS else Found(False)


def _accumulate_and_collect(operands: Operands, n: int, scan: Scan, velocity: Velocity | None) -> Found:
    """Accumulate, collect the elements above a threshold, and apply momentum if requested."""
    low = kernels.MAGNITUDE  # no magnitude is above it
    room = 0
    if scan.above is not None:
        low = magnitude_bits(scan.above)
        room = min(scan.capacity, n)

    def accumulate_range(start: int, stop: int) -> tuple[int, Sparse]:
        index = pool.empty(min(room, stop - start), index_dtype(n))
        values = pool.empty(index.size, np.float32)
        given = *operands(start, stop), low, index, values
        if velocity is not None:
            old, new, momentum = velocity
            most, count = kernels.accumulate_velocity(*given, old[start:stop], new[start:stop], np.float32(momentum))
        else:
            most, count = kernels.accumulate_above(*given)
        if start:
            index[:count] += start
        return most, Sparse(index[:count], values[:count])

    (most, above), *others = in_ranges(accumulate_range, n, kernels.BLOCK)
    if others:
        most = max(most, *(each for each, _ in others))
        above = Sparse(*map(joined, zip(above, *(each for _, each in others), strict=True)))
    if most >= INF_BITS:
        return Found(False)
    return Found(True, above=above if scan.above is not None and above.index.size < scan.capacity else None)


def _pieces(x: Array, joined: Joined) -> list[tuple[Array, Any]]:
    """Return (part of ``x``, part of ``joined``) for each part of a joined vector."""
    stops = np.cumsum([size_of(part) for part in joined.parts]).tolist()
    if stops[-1] != x.size:
        raise ValueError(f"a vector of {stops[-1]} elements cannot be written to an array of {x.size}")
    return [(x[stop - size_of(part) : stop], part) for part, stop in zip(joined.parts, stops, strict=True)]


class ArithmeticOps(NumpyOps):
    """Add, subtract and write dense and sparse vectors."""

    def accumulate(
        self,
        gradient: Array,
        residual: Array,
        scale: float,
        out: Array,
        scan: Scan = NOTHING,
        velocity: Velocity | None = None,
    ) -> Found:
        if not plain(gradient, residual, out, *(velocity or ())[:2]):
            return super().accumulate(gradient, residual, scale, out, scan, velocity)
        collects = scan.above is not None or velocity is not None
        if (
            collects + (scan.chunk > 0) + (scan.product is not None) > 1
            or (scan.above is not None and scan.above < 0)
            or scan.halves is not None
            or (scan.product is not None and not _multiplies_in_pass(scan.product, out.size))
        ):
            # rare combinations and small vectors: one pass for each result
            if not self.accumulate(gradient, residual, scale, out, NOTHING, velocity).finite:
                return Found(False)
            return self._results(out, True, scan)
        if scan.product is not None:
            return _accumulate_with_product(gradient, residual, np.float32(scale), out, scan.product)
        return _in_one_pass(gradient, residual, np.float32(scale), out, scan, velocity)

    def accumulate_parts(
        self,
        gradients: Sequence[Array],
        residual: Array,
        scales: Sequence[float],
        out: Array,
        spans: Sequence[Span],
        scans: Sequence[Scan],
        velocity: Velocity | None = None,
    ) -> list[Found]:
        if len(gradients) == 1 or velocity is not None or not _fit_one_kernel(gradients, residual, out, spans, scans):
            return super().accumulate_parts(gradients, residual, scales, out, spans, scans, velocity)
        room = [
            0 if scan.above is None else min(scan.capacity, gradient.size)
            for gradient, scan in zip(gradients, scans, strict=True)
        ]
        starts = np.cumsum([0, *room])
        index = pool.empty(int(starts[-1]), np.int32)
        values = pool.empty(int(starts[-1]), np.float32)
        lows = [kernels.MAGNITUDE if scan.above is None else magnitude_bits(scan.above) for scan in scans]
        most = np.empty(len(gradients), np.int32)
        counts = np.empty(len(gradients), np.int64)
        kernels.accumulate_parts(
            addresses(gradients),
            residual,
            np.array(scales, np.float32),
            out,
            np.array(spans),
            np.array(lows, np.int32),
            starts,
            index,
            values,
            most,
            counts,
        )
        found = []
        for scan, start, collected, largest in zip(
            scans, starts.tolist(), counts.tolist(), most.tolist(), strict=False
        ):
            stop = start + collected
            if largest >= INF_BITS:
                found.append(Found(False))
            elif scan.above is None or collected >= scan.capacity:
                found.append(Found(True))
            else:
                found.append(Found(True, above=Sparse(index[start:stop], values[start:stop])))
        return found

    def inspect(self, x: Array, scan: Scan) -> Found:
        if scan.halves is not None and scan == Scan(halves=scan.halves) and plain(x):
            scale, limit, out = scan.halves
            if 0 < limit <= FP16_MAX and plain(out, dtype=np.float16) and out.size == x.size:
                clipped, most = clipped_to_fp16(x, scale, limit, out)
                return Found(True, saturated=clipped) if most < INF_BITS else Found(False)
        return super().inspect(x, scan)

    def subtract(self, x: Array, own: Array | Sparse | Coded, factor: float) -> None:
        if isinstance(own, Joined):
            for part, piece in _pieces(x, own):
                self.subtract(part, piece, factor)
        elif plain_outer(own, x, factor):
            matrices.outer(*as_matrices(own, x), np.float32(own.scale * factor), True)
        elif isinstance(own, Spectra) and plain(x):
            write_spectra(own, factor, x, subtract=True)
        elif isinstance(own, Coded):
            if factor != 1.0 or not coded.subtract(x, own):
                self.subtract(x, self.dense(own), factor)
        elif plain_sparse(own, x):
            kernels.add_at(x, own.index, own.values, -np.float32(factor))  # x − v and x + (−v) are the same float
        elif not isinstance(own, Sparse) and factor != 1.0 and plain(x, own):
            kernels.subtract(x, own, np.float32(factor))
        else:
            super().subtract(x, own, factor)

    def write_parts(self, outs: Sequence[Array], total: Array | Sparse | Shares | Coded, factor: float) -> None:
        shares: Sequence[Any] = total.each if isinstance(total, Shares) else [total]
        if not isinstance(total, Sparse | Shares | Spectra | Outer):
            ends = list(itertools.accumulate(map(len, outs)))
            for out, end in zip(outs, ends, strict=True):
                self.write(out, piece_of(total, end - len(out), end), factor)
            return
        if not (all(map(plain, outs)) and all(is_plain_sparse(share) for share in shares)):
            super().write_parts(outs, total, factor)
            return
        index, values = (np.concatenate(each) if len(shares) > 1 else each[0] for each in zip(*shares, strict=True))
        bounds = np.cumsum([0, *(out.size for out in outs)])
        kernels.write_runs(addresses(outs), bounds, index, values, np.float32(factor))

    def write(self, out: Array, total: Array | Sparse | Shares | Coded, factor: float) -> None:
        if isinstance(total, Shares):
            if not all(plain_sparse(share, out) for share in total.each):
                super().write(out, total, factor)
                return
            self.write_parts([out], total, factor)
        elif isinstance(total, Joined):
            for part, piece in _pieces(out, total):
                self.write(part, piece, factor)
        elif plain_outer(total, out, factor):
            matrices.outer(*as_matrices(total, out), np.float32(total.scale * factor), False)
        elif isinstance(total, Spectra) and plain(out):
            write_spectra(total, factor, out, subtract=False)
        elif isinstance(total, Coded):
            if not coded.write(out, total, factor):
                super().write(out, super().dense(total), factor)
        elif plain_sparse(total, out):
            self.write_parts([out], total, factor)
        else:
            super().write(out, total, factor)

    def dense(self, x: Array | Coded) -> Array:
        if not isinstance(x, Coded):
            return x
        out = np.empty(x.size, np.float32)
        if not coded.write(out, x, 1.0):
            self.write(out, x, 1.0)
        return out

    def scaled(self, x: Array, factor: float, limit: float = FP32_MAX) -> Array:
        if not plain(x):
            return super().scaled(x, factor, limit)
        out = np.empty(x.size, np.float32)
        kernels.scaled(x, np.float32(factor), np.float32(limit), out)
        return out
