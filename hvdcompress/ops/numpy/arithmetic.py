"""Arithmetic: add, subtract and write dense and sparse vectors (:class:`hvdcompress.ops.spec.Ops` says how)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdcompress.ops.numpy.floats import from_fp16
from hvdcompress.ops.numpy.selection import chunk_argmax, first_above
from hvdcompress.ops.numpy.statistics import all_finite, moments
from hvdcompress.ops.shared import index_dtype
from hvdcompress.ops.spec import FP32_MAX, Half, Scalar, Sparse
from hvdcompress.ops.spec import NumpyArray as Array


def accumulate(gradient: Array, residual: Array, scale: float, out: Array, clear: bool = False) -> bool:
    with np.errstate(over="ignore", invalid="ignore"):  # the caller is told
        if scale == 1.0:
            np.add(gradient, residual, out=out)
        else:
            np.multiply(gradient, np.float32(scale), out=out)
            out += residual
    if clear:
        gradient[...] = 0
    return all_finite(out)


def accumulate_moments(
    gradient: Array, residual: Array, scale: float, out: Array, clear: bool = False
) -> tuple[float, float]:
    finite = accumulate(gradient, residual, scale, out, clear)
    return moments(out) if finite else (np.nan, np.nan)


def accumulate_argmax(
    gradient: Array, residual: Array, scale: float, out: Array, chunk: int, clear: bool = False
) -> tuple[bool, Array]:
    return accumulate(gradient, residual, scale, out, clear), chunk_argmax(out, chunk)


def accumulate_above(
    gradient: Array,
    residual: Array,
    scale: float,
    out: Array,
    threshold: Scalar,
    capacity: int,
    clear: bool = False,
) -> tuple[bool, Sparse]:
    finite, index = accumulate(gradient, residual, scale, out, clear), first_above(out, threshold, capacity)
    return finite, Sparse(index, out[index])


def keep_if(finite: bool, x: Array, other: Array | None = None) -> None:
    if not finite:
        x[...] = 0 if other is None else other


def blend(x: Array, residual: Array, beta: float) -> None:
    x *= np.float32(beta)
    x += np.float32(1.0 - beta) * residual


def subtract(x: Array, own: Array | Sparse, factor: float) -> None:
    f = np.float32(factor)
    if isinstance(own, Sparse):
        np.subtract.at(x, own.index, f * own.values)
    else:
        np.subtract(x, own if f == 1 else f * own, out=x)


def zero_where(x: Array, own: Array | Sparse) -> None:
    if isinstance(own, Sparse):
        x[own.index[own.values != 0]] = 0
    else:
        x[own != 0] = 0


def write(out: Array, total: Array | Sparse | Half, factor: float, cleared: bool = False) -> None:
    if isinstance(total, Half):
        total = from_fp16(total.values, total.scale)
    if isinstance(total, Sparse):
        if not cleared:
            out[...] = 0
        np.add.at(out, total.index, (total.values * np.float32(factor)).astype(out.dtype, copy=False))
    elif factor == 1.0:
        out[...] = total
    else:
        np.multiply(total, total.dtype.type(factor), out=out, casting="same_kind")


def split(total: Sparse, sizes: Sequence[int]) -> list[Sparse]:
    stops = np.cumsum(sizes, dtype=np.int64)
    starts = stops - sizes
    runs = np.concatenate([[0], np.flatnonzero(total.index[1:] < total.index[:-1]) + 1, [total.index.size]])
    cuts = [
        begin + np.searchsorted(total.index[begin:end], [*starts, stops[-1]])
        for begin, end in zip(runs[:-1].tolist(), runs[1:].tolist(), strict=True)
    ]
    pieces = []
    for number, start in enumerate(starts):
        spans = [slice(cut[number], cut[number + 1]) for cut in cuts]
        index = np.concatenate([total.index[span] for span in spans]) - start.astype(total.index.dtype)
        pieces.append(Sparse(index, np.concatenate([total.values[span] for span in spans])))
    return pieces


def add_all(arrays: list[Array]) -> Array:
    total = arrays[0].copy()
    for array in arrays[1:]:
        total += array
    return total


def merge(a: Sparse, b: Sparse, n: int) -> Sparse:
    index, place = np.unique(np.concatenate([a.index, b.index]), return_inverse=True)
    values = np.zeros(index.size, np.float32)
    np.add.at(values, place, np.concatenate([a.values, b.values]))
    return Sparse(index.astype(index_dtype(n)), values)


def scaled(x: Array, factor: float, limit: float = FP32_MAX) -> Array:
    with np.errstate(over="ignore"):  # Inf is then clipped
        out = x * np.float32(factor)
    return np.clip(out, -np.float32(limit), np.float32(limit), out=out)
