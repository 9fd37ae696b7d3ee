"""Verbs of the reference for coarse codes: random numbers, norms of buckets, levels, signs, fields that add.

Arrays are flat, float32 where nothing else is said. ``numpy.py`` hands these verbs on. They work through a
tensor in slices, so that what they make on the way stays in the processor's cache.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

Array = np.ndarray[Any, Any]
Norm = Literal["max", "l2", "mean"]

__all__ = [
    "bucket_norms", "dequantize", "pack_fields", "pack_signs", "quantize", "uniform", "unpack_fields", "unpack_signs",
]  # fmt: skip

PIECE = 512  # summands that are added by halves
LARGEST = 0x7F7FFFFF  # the bits of the largest float32
_MAX = float(np.finfo(np.float32).max)
_SLICE = 1 << 15  # elements at a time, a multiple of 8


# -- random numbers --------------------------------------------------------------------------------


def mix(x: Array) -> Array:
    """The finalizer of MurmurHash3 (Appleby): a bijection of uint32 in which each bit depends on all."""
    x = (x ^ x >> np.uint32(16)) * np.uint32(0x85EBCA6B)
    x = (x ^ x >> np.uint32(13)) * np.uint32(0xC2B2AE35)
    return x ^ x >> np.uint32(16)


def uniform(key: Array, count: int, like: Array, start: int = 0) -> Array:
    """Numbers ``start``, ``start`` + 1, … of the stream of a key ([1] uint32, on the host) [count] float32.

    They are multiples of 2^-24 in [0, 1), made on the device of ``like``.
    """
    bits = mix(mix(np.arange(start, start + count, dtype=np.uint32) + key) ^ key)
    return (bits >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)


# -- norms of buckets ------------------------------------------------------------------------------


def fold(rows: Array) -> Array:
    """The sums of rows [m, w] float64 -> [m], which it overwrites.

    The order of the additions is the same in every backend, and so is each bit of the sum: pieces of 512, each
    folded by halves, then the sums of the pieces in the same way.
    """
    count, width = rows.shape
    if width > PIECE:
        pieces = -(-width // PIECE)
        rows = np.pad(rows, ((0, 0), (0, pieces * PIECE - width)))
        return fold(fold(rows.reshape(-1, PIECE)).reshape(count, pieces))
    while width > 1:
        half = (width + 1) // 2
        rows[:, : width - half] += rows[:, half:width]
        width = half
    return rows[:, 0]


def norms_of(sums: Array, n: int, bucket: int, norm: Norm) -> Array:
    """Sums of squares (or for "mean" of magnitudes) of buckets [m] float64 -> their norms [m] float32.

    A sum is at least its largest term, and all steps round to the nearest: no |x| exceeds its bucket's l2-norm.
    One that float32 cannot hold becomes the largest float32, which none exceeds either.
    """
    if norm == "mean":
        return (sums / np.minimum(bucket, n - bucket * np.arange(sums.size))).astype(np.float32)
    return np.minimum(np.sqrt(sums), _MAX).astype(np.float32)


def bucket_norms(x: Array, bucket: int, norm: Norm) -> Array:
    """The norms of each ``bucket`` elements [ceil(n/bucket)]; the last bucket may be shorter.

    ``norm``: the largest magnitude, the l2-norm, or the mean magnitude; sums are float64.
    """
    bucket = max(1, min(bucket, x.size))
    out = np.zeros(-(-x.size // bucket), np.float32 if norm == "max" else np.float64)
    rows = max(1, _SLICE // bucket)
    for first in range(0, out.size, rows):
        part = x[first * bucket : (first + rows) * bucket]
        if norm == "max":
            out[first : first + rows] = np.maximum.reduceat(np.abs(part), np.arange(0, part.size, bucket))
            continue
        wide = np.zeros((-(-part.size // bucket), bucket))
        wide.reshape(-1)[: part.size] = part
        out[first : first + rows] = fold(np.square(wide, out=wide) if norm == "l2" else np.abs(wide, out=wide))
    return out if norm == "max" else norms_of(out, x.size, bucket, norm)


# -- levels ----------------------------------------------------------------------------------------


def quantize(x: Array, norms: Array, bucket: int, bits: int, key: Array) -> Array:
    """x [n] -> a sign and a level below 2^(bits − 1) each, packed, lowest bit first [ceil(n·bits/8)] uint8.

    |x|/norm·s lies between two of the levels 0 … s = 2^(bits − 1) − 1, and becomes one of them at random, with
    numbers from ``key``, so that its mean is right. The sign is a code's highest bit. |x| > norm counts as norm.
    """
    levels, out = np.float32((1 << (bits - 1)) - 1), np.empty(-(-x.size * bits // 8), np.uint8)
    safe = np.where(norms > 0, norms, np.float32(1))
    for start in range(0, x.size, _SLICE):
        part = np.ascontiguousarray(x[start : start + _SLICE])
        with np.errstate(invalid="ignore", over="ignore"):  # of Inf and NaN, whose step will be abandoned
            share = np.abs(part) / safe[np.arange(start, start + part.size) // bucket]
        share = np.fmin(share, np.float32(1)) * levels
        level = np.floor(share)
        # share − level is exact, so what lies on a level stays there
        level += uniform(key, part.size, x, start) < share - level
        codes = level.astype(np.uint8) | (part.view(np.uint32) >> 31 << (bits - 1)).astype(np.uint8)
        split = np.unpackbits(codes, bitorder="little").reshape(-1, 8)[:, :bits]
        packed = np.packbits(split.ravel(), bitorder="little")
        out[start * bits // 8 : start * bits // 8 + packed.size] = packed
    return out


def level_values(bits: int) -> Array:
    """What each code stands for in units of its norm [2^bits]: ±level/s; there is one zero only."""
    level = np.arange(1 << (bits - 1), dtype=np.float32) / np.float32((1 << (bits - 1)) - 1)
    return np.concatenate([level, np.float32(0) - level])


def dequantize(buffer: Array, norms: Array, bucket: int, bits: int, count: int) -> Array:
    """The inverse of :func:`quantize`: ±norm·level/s [count]; norms that are none are read as finite ones."""
    values, out = level_values(bits), np.empty(count, np.float32)
    norms = np.clip(norms.view(np.int32), 0, LARGEST).view(np.float32)
    for start in range(0, count, _SLICE):
        part = out[start : start + _SLICE]
        split = np.zeros((part.size, 8), np.uint8)
        packed = buffer[start * bits // 8 : start * bits // 8 + -(-part.size * bits // 8)]
        split[:, :bits] = np.unpackbits(packed, count=part.size * bits, bitorder="little").reshape(-1, bits)
        codes = np.packbits(split.ravel(), bitorder="little")
        np.multiply(values[codes], norms[np.arange(start, start + part.size) // bucket], out=part)
    return out


# -- signs -----------------------------------------------------------------------------------------


def pack_signs(x: Array) -> Array:
    """One bit an element, lowest first: whether x < 0 [ceil(n/8)] uint8."""
    return np.packbits(x < 0, bitorder="little")


def unpack_signs(buffer: Array, scale: Array, count: int) -> Array:
    """The inverse of :func:`pack_signs`: −scale or +scale [count], of ``scale`` [1]."""
    scale = np.clip(scale.view(np.int32), 0, LARGEST).view(np.float32)
    return np.concatenate([scale, -scale])[np.unpackbits(buffer, count=count, bitorder="little")]


# -- fields that add -------------------------------------------------------------------------------


def pack_fields(values: Array, width: int) -> Array:
    """Whole numbers v [n] -> words of ⌊32/width⌋ of them, Σ v_j·2^(width·j) [ceil(n/⌊32/width⌋)] int32.

    Sums of words are words of the sums, while those stay within ±(2^width − 1)/2; no word then overflows.
    """
    per = 32 // width
    words = np.zeros(-(-values.size // per), np.int32)
    for place in range(per):
        fields = values[place::per].astype(np.int32)
        words[: fields.size] += fields << np.int32(place * width)
    return words


def unpack_fields(words: Array, width: int, count: int, bound: int) -> Array:
    """The inverse of :func:`pack_fields` [count] float32, for numbers within ±bound."""
    per, mask, out = 32 // width, np.uint32((1 << width) - 1), np.empty(count, np.float32)
    # with bound added to each field, none is below 0, and none borrows from the next
    raised = words.view(np.uint32) + np.uint32(sum(bound << place * width for place in range(per)) & 0xFFFFFFFF)
    for place in range(per):
        part = out[place::per]
        fields = (raised >> np.uint32(place * width) & mask)[: part.size]
        np.subtract(fields, np.float64(bound), out=part, casting="same_kind")
    return out
