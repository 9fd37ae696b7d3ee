"""Codes: stochastic rounding, signs, and packed fields (documented in :class:`hvdcompress.ops.spec.Ops`).

torch supports few operations on uint32, so computations with bits use int32 or int64.
"""

from __future__ import annotations

import torch

from hvdcompress.ops.shared import FP32_MAX_BITS, MIX_FACTORS, drawn_indices, level_values
from hvdcompress.ops.torch.bits import packed, unpacked
from hvdcompress.ops.torch.statistics import bucket_norms
from hvdcompress.ops.torch.tensors import f32, in_rows, uploaded
from hvdcompress.ops.vectors import Array, NumpyArray


def uniform(key: NumpyArray, count: int, like: Array, start: int = 0) -> Array:
    word = _signed(int(key[0]))
    wide = torch.int32 if start + count < 2**31 else torch.int64
    index = torch.arange(start, start + count, dtype=wide, device=like.device).to(torch.int32)
    return _shift(_mix(_mix(index + word) ^ word), 8).to(torch.float32).mul_(2.0**-24)


def _mix(x: Array) -> Array:
    """Compute :func:`hvdcompress.ops.shared.mix` on int32, whose products wrap to the same bits as those of uint32."""
    x = (x ^ _shift(x, 16)).mul_(_signed(MIX_FACTORS[0]))
    x = (x ^ _shift(x, 13)).mul_(_signed(MIX_FACTORS[1]))
    return x ^ _shift(x, 16)


def _signed(word: int) -> int:
    """Return the int32 with the bits of a uint32."""
    return word - (word >> 31 << 32)


def _shift(x: Array, distance: int) -> Array:
    """Shift int32 to the right like an unsigned integer."""
    return (x >> distance) & ((1 << (32 - distance)) - 1)


def distinct_indices(key: NumpyArray, k: int, n: int) -> NumpyArray:
    return drawn_indices(key, k, n)


def quantize(x: Array, norms: Array, bucket: int, bits: int, key: NumpyArray, out: Array | None = None) -> Array:
    safe = torch.where(norms > 0, norms, 1.0)
    share = x.abs().div_(each_norm(safe, bucket, len(x)))
    share = torch.fmin(share, share.new_ones(1)).mul_((1 << (bits - 1)) - 1)
    level = share.floor()
    share.sub_(level)  # exact
    level += uniform(key, len(x), x) < share
    codes = packed(level.to(torch.uint8) | (torch.signbit(x).to(torch.uint8) << (bits - 1)), bits)
    return codes if out is None else out.copy_(codes)


def quantize_max(x: Array, bucket: int, bits: int, key: NumpyArray, out: Array | None = None) -> tuple[Array, Array]:
    norms = bucket_norms(x, bucket, "max")
    return norms, quantize(x, norms, bucket, bits, key, out)


def quantize_fields(
    x: Array, limit: float, norm: Array, width: int, key: NumpyArray, out: Array | None = None
) -> Array:
    share = x.abs().clamp_(max=f32(limit)).div_(torch.where(norm > 0, norm, 1.0))
    words = pack_fields((uniform(key, len(x), x) < share) * torch.sign(x), width)
    return words if out is None else out.copy_(words)


def dequantize(buffer: Array, norms: Array, bucket: int, bits: int, count: int) -> Array:
    values = uploaded(torch.from_numpy(level_values(bits)), buffer)
    codes = unpacked(buffer, bits, count).to(torch.int32)
    return values.index_select(0, codes).mul_(each_norm(finite_norms(norms), bucket, count))


def each_norm(norms: Array, bucket: int, n: int) -> Array:
    """Return the norm of each element [n], or [1] if all elements share one norm."""
    return norms[:1] if bucket >= n else norms.repeat_interleave(bucket)[:n]


def finite_norms(norms: Array) -> Array:
    """Read norms that are negative, infinite or NaN as finite numbers."""
    return norms.view(torch.int32).clamp(0, FP32_MAX_BITS).view(torch.float32)


def pack_signs(x: Array) -> Array:
    return packed((x < 0).to(torch.uint8), 1)


def unpack_signs(buffer: Array, scale: Array, count: int) -> Array:
    scale = finite_norms(scale)
    return torch.where(unpacked(buffer, 1, count) > 0, -scale, scale)


def pack_fields(values: Array, width: int) -> Array:
    shift = torch.arange(0, 32 // width * width, width, dtype=torch.int32, device=values.device)
    return (in_rows(values.to(torch.int32), 32 // width) << shift).sum(1, dtype=torch.int32)


def unpack_fields(words: Array, width: int, count: int, bound: int) -> Array:
    shifts = range(0, 32 // width * width, width)
    # after bound has been added to each field, no field is negative, and none borrows from the next field
    raised = words.to(torch.int64) + sum(bound << distance for distance in shifts)
    shift = torch.arange(shifts.start, shifts.stop, shifts.step, device=words.device)
    fields = (raised[:, None] >> shift) & ((1 << width) - 1)
    return (fields.view(-1)[:count] - bound).to(torch.float32)
