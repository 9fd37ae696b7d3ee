"""Codes: stochastic rounding, signs, and packed fields (documented in :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

import numpy as np

from hvdcompress.ops.numpy.bits import bits_of
from hvdcompress.ops.numpy.statistics import bucket_norms
from hvdcompress.ops.shared import FP32_MAX_BITS, drawn_indices, level_values, mix
from hvdcompress.ops.vectors import NumpyArray as Array

_SLICE = 1 << 15  # elements per slice, a multiple of 8: intermediate results stay in the processor's cache


def uniform(key: Array, count: int, like: Array, start: int = 0) -> Array:
    bits = mix(mix(np.arange(start, start + count, dtype=np.uint32) + key) ^ key)
    return (bits >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)


def distinct_indices(key: Array, k: int, n: int) -> Array:
    return drawn_indices(key, k, n)


def quantize(x: Array, norms: Array, bucket: int, bits: int, key: Array, out: Array | None = None) -> Array:
    s = np.float32((1 << (bits - 1)) - 1)
    out = np.empty(-(-x.size * bits // 8), np.uint8) if out is None else out
    safe = np.where(norms > 0, norms, np.float32(1))
    for start in range(0, x.size, _SLICE):
        part = np.ascontiguousarray(x[start : start + _SLICE])
        with np.errstate(invalid="ignore", over="ignore"):  # NaN and Inf: the step will be discarded
            share = np.abs(part) / safe[np.arange(start, start + part.size) // bucket]
        share = np.fmin(share, np.float32(1)) * s
        level = np.floor(share)
        # share − level is exact, so a number that is equal to a level is not rounded
        level += uniform(key, part.size, x, start) < share - level
        codes = level.astype(np.uint8) | (part.view(np.uint32) >> 31 << (bits - 1)).astype(np.uint8)
        split = np.unpackbits(codes, bitorder="little").reshape(-1, 8)[:, :bits]
        packed = np.packbits(split.ravel(), bitorder="little")
        out[start * bits // 8 : start * bits // 8 + packed.size] = packed
    return out


def quantize_max(x: Array, bucket: int, bits: int, key: Array, out: Array | None = None) -> tuple[Array, Array]:
    norms = bucket_norms(x, bucket, "max")
    return norms, quantize(x, norms, bucket, bits, key, out)


def quantize_fields(x: Array, limit: float, norm: Array, width: int, key: Array, out: Array | None = None) -> Array:
    clipped = np.clip(x, -np.float32(limit), np.float32(limit))
    codes = quantize(clipped, norm, max(x.size, 1), 2, key)
    words = pack_fields(dequantize(codes, np.ones(1, np.float32), max(x.size, 1), 2, x.size), width)
    if out is None:
        return words
    out[...] = words
    return out


def dequantize(buffer: Array, norms: Array, bucket: int, bits: int, count: int) -> Array:
    values = level_values(bits)
    norms = finite_norms(norms)
    out = np.zeros(count, np.float32)
    for start in range(0, count, _SLICE):
        part = out[start : start + _SLICE]
        split = np.zeros((part.size, 8), np.uint8)
        packed = buffer[start * bits // 8 : start * bits // 8 + -(-part.size * bits // 8)]
        split[:, :bits] = bits_of(packed, part.size * bits).reshape(-1, bits)
        codes = np.packbits(split.ravel(), bitorder="little")
        part[:] = values[codes] * norms[np.arange(start, start + part.size) // bucket]
    return out


def finite_norms(norms: Array) -> Array:
    """Read norms that are negative, infinite or NaN as finite numbers."""
    return np.clip(norms.view(np.int32), 0, FP32_MAX_BITS).view(np.float32)


def pack_signs(x: Array) -> Array:
    return np.packbits(x < 0, bitorder="little")


def unpack_signs(buffer: Array, scale: Array, count: int) -> Array:
    scale = finite_norms(scale)
    return np.concatenate([scale, -scale])[bits_of(buffer, count)]


def pack_fields(values: Array, width: int) -> Array:
    per = 32 // width
    words = np.zeros(-(-values.size // per), np.int32)
    for j in range(per):
        fields = values[j::per].astype(np.int32)
        words[: fields.size] += fields << np.int32(j * width)
    return words


def unpack_fields(words: Array, width: int, count: int, bound: int) -> Array:
    per = 32 // width
    mask = np.uint32((1 << width) - 1)
    out = np.empty(count, np.float32)
    # after bound has been added to each field, no field is negative, and none borrows from the next field
    raised = words.view(np.uint32) + np.uint32(sum(bound << j * width for j in range(per)) & 0xFFFFFFFF)
    for j in range(per):
        part = out[j::per]
        fields = (raised >> np.uint32(j * width) & mask)[: part.size]
        np.subtract(fields, np.float64(bound), out=part, casting="same_kind")
    return out
