"""Verbs on torch tensors for coarse codes; ``_numpy_codes.py`` is their reference."""

from __future__ import annotations

import numpy as np
import torch

from hvdcompress.method import Array
from hvdcompress.ops._numpy_codes import LARGEST, PIECE, Norm, level_values

__all__ = [
    "bucket_norms", "dequantize", "pack_fields", "pack_signs", "quantize", "uniform", "unpack_fields", "unpack_signs",
]  # fmt: skip

_MAX = float(np.finfo(np.float32).max)


# -- random numbers --------------------------------------------------------------------------------


def _signed(word: int) -> int:
    """32 bits as the int32 that has them."""
    return word - (word >> 31 << 32)


def _shift(x: Array, places: int) -> Array:
    """int32 shifted to the right as if it were unsigned."""
    return (x >> places) & ((1 << (32 - places)) - 1)


def _mix(x: Array) -> Array:
    """The reference's hash, on the bits of int32 (products wrap round as those of uint32 do)."""
    x = (x ^ _shift(x, 16)).mul_(_signed(0x85EBCA6B))
    x = (x ^ _shift(x, 13)).mul_(_signed(0xC2B2AE35))
    return x ^ _shift(x, 16)


def uniform(key: np.ndarray, count: int, like: Array, start: int = 0) -> Array:
    """Numbers ``start``, ``start`` + 1, … of the stream of a key ([1] uint32, on the host) [count] float32.

    They are multiples of 2^-24 in [0, 1), made on the device of ``like``.
    """
    word = _signed(int(key[0]))
    wide = torch.int32 if start + count < 2**31 else torch.int64
    index = torch.arange(start, start + count, dtype=wide, device=like.device).to(torch.int32)
    return _shift(_mix(_mix(index + word) ^ word), 8).to(torch.float32).mul_(2.0**-24)


# -- norms of buckets ------------------------------------------------------------------------------


def _rows(x: Array, width: int) -> Array:
    """x as rows of ``width``, the last one filled with zeros."""
    return torch.nn.functional.pad(x, (0, -len(x) % width)).view(-1, width)


def _fold(rows: Array) -> Array:
    """The sums of rows [m, w] float64 -> [m], added in the reference's order; overwrites them."""
    count, width = rows.shape
    if width > PIECE:
        pieces = -(-width // PIECE)
        rows = torch.nn.functional.pad(rows, (0, pieces * PIECE - width))
        return _fold(_fold(rows.view(-1, PIECE)).view(count, pieces))
    while width > 1:
        half = (width + 1) // 2
        rows[:, : width - half] += rows[:, half:width]
        width = half
    return rows[:, 0].clone()


def bucket_norms(x: Array, bucket: int, norm: Norm) -> Array:
    """The norms of each ``bucket`` elements [ceil(n/bucket)]; the last bucket may be shorter.

    ``norm``: the largest magnitude, the l2-norm, or the mean magnitude; sums are float64.
    """
    if not len(x):
        return x.new_zeros(0)
    bucket = min(bucket, len(x))
    if norm == "max":
        return _rows(x, bucket).abs().amax(1)
    if norm == "l2":
        return _fold(_rows(x.double().square_(), bucket)).sqrt_().clamp_(max=_MAX).to(torch.float32)
    sums = _fold(_rows(x.double().abs_(), bucket))
    starts = torch.arange(0, len(x), bucket, dtype=torch.float64, device=x.device)
    return (sums / (len(x) - starts).clamp_(max=bucket)).to(torch.float32)


# -- levels ----------------------------------------------------------------------------------------


def _each(norms: Array, bucket: int, n: int) -> Array:
    """Every element's norm [n], or [1] where all have the same."""
    return norms[:1] if bucket >= n else norms.repeat_interleave(bucket)[:n]


def _pack(codes: Array, width: int) -> Array:
    """Codes of ``width`` bits (uint8), lowest bit first, without gaps [ceil(n·width/8)] uint8."""
    n = len(codes)
    codes = _rows(codes, 8)
    if 8 % width:  # split them into single bits first
        place = torch.arange(width, dtype=torch.uint8, device=codes.device)
        codes, width = (codes.view(-1)[:, None] >> place) & 1, 1
        n *= len(place)
    place = torch.arange(0, 8, width, dtype=torch.uint8, device=codes.device)
    return (codes.view(-1, len(place)) << place).sum(1, dtype=torch.uint8)[: -(-n * width // 8)]


def _unpack(buffer: Array, width: int, count: int) -> Array:
    """The inverse of :func:`_pack` [count] uint8."""
    step = width if 8 % width == 0 else 1
    place = torch.arange(0, 8, step, dtype=torch.uint8, device=buffer.device)
    codes = ((buffer[:, None] >> place) & ((1 << step) - 1)).view(-1)[: count * width // step]
    if step == width:
        return codes
    place = torch.arange(width, dtype=torch.uint8, device=buffer.device)
    return (codes.view(count, width) << place).sum(1, dtype=torch.uint8)


def quantize(x: Array, norms: Array, bucket: int, bits: int, key: np.ndarray) -> Array:
    """x [n] -> a sign and a level below 2^(bits − 1) each, packed, lowest bit first [ceil(n·bits/8)] uint8.

    |x|/norm·s lies between two of the levels 0 … s = 2^(bits − 1) − 1, and becomes one of them at random, with
    numbers from ``key``, so that its mean is right. The sign is a code's highest bit. |x| > norm counts as norm.
    """
    safe = torch.where(norms > 0, norms, 1.0)
    share = x.abs().div_(_each(safe, bucket, len(x)))
    share = torch.fmin(share, share.new_ones(1)).mul_((1 << (bits - 1)) - 1)
    level = share.floor()
    share.sub_(level)  # exact
    level += uniform(key, len(x), x) < share
    return _pack(level.to(torch.uint8) | (torch.signbit(x).to(torch.uint8) << (bits - 1)), bits)


def dequantize(buffer: Array, norms: Array, bucket: int, bits: int, count: int) -> Array:
    """The inverse of :func:`quantize`: ±norm·level/s [count]; norms that are none are read as finite ones."""
    values = torch.from_numpy(level_values(bits)).to(buffer.device)
    norms = norms.view(torch.int32).clamp(0, LARGEST).view(torch.float32)
    return values.index_select(0, _unpack(buffer, bits, count).to(torch.int32)).mul_(_each(norms, bucket, count))


# -- signs -----------------------------------------------------------------------------------------


def pack_signs(x: Array) -> Array:
    """One bit an element, lowest first: whether x < 0 [ceil(n/8)] uint8."""
    return _pack((x < 0).to(torch.uint8), 1)


def unpack_signs(buffer: Array, scale: Array, count: int) -> Array:
    """The inverse of :func:`pack_signs`: −scale or +scale [count], of ``scale`` [1]."""
    scale = scale.view(torch.int32).clamp(0, LARGEST).view(torch.float32)
    return torch.where(_unpack(buffer, 1, count) > 0, -scale, scale)


# -- fields that add -------------------------------------------------------------------------------


def pack_fields(values: Array, width: int) -> Array:
    """Whole numbers v [n] -> words of ⌊32/width⌋ of them, Σ v_j·2^(width·j) [ceil(n/⌊32/width⌋)] int32.

    Sums of words are words of the sums, while those stay within ±(2^width − 1)/2; no word then overflows.
    """
    place = torch.arange(0, 32 // width * width, width, dtype=torch.int32, device=values.device)
    return (_rows(values.to(torch.int32), 32 // width) << place).sum(1, dtype=torch.int32)


def unpack_fields(words: Array, width: int, count: int, bound: int) -> Array:
    """The inverse of :func:`pack_fields` [count] float32, for numbers within ±bound."""
    places = range(0, 32 // width * width, width)
    raised = words.to(torch.int64) + sum(bound << place for place in places)
    fields = (raised[:, None] >> torch.tensor(places, device=words.device)) & ((1 << width) - 1)
    return (fields.view(-1)[:count] - bound).to(torch.float32)
