"""Codes, compiled: stochastic rounding, signs, and packed fields (see :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

import math

import numpy as np

from hvdcompress.ops import numpy as reference
from hvdcompress.ops import pool
from hvdcompress.ops.numba import coded
from hvdcompress.ops.numba._kernels import codes as kernels
from hvdcompress.ops.numba.arrays import ONE, plain
from hvdcompress.ops.numba.threads import in_ranges
from hvdcompress.ops.shared import half_bits, index_dtype, round_keys
from hvdcompress.ops.vectors import Codes, Fields
from hvdcompress.ops.vectors import NumpyArray as Array


def distinct_indices(key: Array, k: int, n: int) -> Array:
    half = half_bits(n)
    dtype = np.int32 if half < 16 else np.int64  # must also hold the indices beyond n that are drawn again
    out = pool.empty(k, dtype)
    other = pool.empty(k, dtype)
    swapped = kernels.distinct_indices(half, round_keys(key), n, out, other)
    return (other if swapped else out).astype(index_dtype(n), copy=False)


def quantize(x: Array, norms: Array, bucket: int, bits: int, key: Array, out: Array | None = None) -> Array:
    codes = np.empty(-(-x.size * bits // 8), np.uint8) if out is None else out
    if not _fits(x, norms, bucket, codes):
        return reference.quantize(x, norms, bucket, bits, key, out)
    _quantize(x, norms, False, bucket, bits, key, codes)
    return codes


def quantize_max(x: Array, bucket: int, bits: int, key: Array, out: Array | None = None) -> tuple[Array, Array]:
    bucket = max(1, min(bucket, x.size))
    codes = np.empty(-(-x.size * bits // 8), np.uint8) if out is None else out
    norms = np.empty(-(-x.size // bucket), np.float32)
    if not _fits(x, norms, bucket, codes):
        return reference.quantize_max(x, bucket, bits, key, out)
    _quantize(x, norms, True, bucket, bits, key, codes)
    return norms, codes


def _quantize(x: Array, norms: Array, find: bool, bucket: int, bits: int, key: Array, codes: Array) -> None:
    given = x, x.view(np.int32), norms, norms.view(np.int32), find, bucket, bits, key[0], codes
    align = math.lcm(bucket, kernels.BLOCK)  # one thread computes the norm of a bucket
    in_ranges(lambda start, stop: kernels.quantize(*given, start, stop), x.size, align)


def _fits(x: Array, norms: Array, bucket: int, codes: Array) -> bool:
    enough = norms.size * bucket >= x.size
    return enough and plain(x) and plain(norms) and plain(codes, dtype=np.uint8)


def quantize_fields(x: Array, limit: float, norm: Array, width: int, key: Array, out: Array | None = None) -> Array:
    words = np.empty(-(-x.size // (32 // width)), np.int32) if out is None else out
    if not x.size or not plain(x) or not plain(words, dtype=np.int32) or words.size != -(-x.size // (32 // width)):
        return reference.quantize_fields(x, limit, norm, width, key, out)
    unit = np.float32(norm[0])
    per = 32 // width
    given = x, np.float32(limit), unit if unit > 0 else ONE, width, key[0], words
    align = kernels.BLOCK // per * per
    in_ranges(lambda start, stop: kernels.quantize_fields(*given, start, stop), x.size, align)
    return words


def dequantize(buffer: Array, norms: Array, bucket: int, bits: int, count: int) -> Array:
    out = np.empty(count, np.float32)
    if not coded.write(out, Codes(buffer, norms, bucket, bits, 0, count), 1.0):
        return reference.dequantize(buffer, norms, bucket, bits, count)
    return out


def pack_signs(x: Array) -> Array:
    if not plain(x):
        return reference.pack_signs(x)
    out = np.empty(-(-x.size // 8), np.uint8)
    kernels.pack_signs(x, np.zeros(kernels.BLOCK, np.int8), out)
    return out


def unpack_signs(buffer: Array, scale: Array, count: int) -> Array:
    out = np.empty(count, np.float32)
    if not coded.write(out, Codes(buffer, scale, max(count, 1), 1, 0, count), 1.0):
        return reference.unpack_signs(buffer, scale, count)
    return out


def unpack_fields(words: Array, width: int, count: int, bound: int) -> Array:
    out = np.empty(count, np.float32)
    if not coded.write(out, Fields(words, width, bound, np.ones(1, np.float32), 0, count), 1.0):
        return reference.unpack_fields(words, width, count, bound)
    return out
