"""Levels: values in units of a norm, rounded to a table (documented in :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

import torch

from hvdcompress.ops.shared import between
from hvdcompress.ops.torch.bits import pack_bits, packed, unpack_bits, unpacked
from hvdcompress.ops.torch.codes import each_norm, finite_norms, uniform
from hvdcompress.ops.torch.tensors import uploaded
from hvdcompress.ops.vectors import Array, NumpyArray


def encode_levels(
    x: Array,
    norms: Array,
    bucket: int,
    levels: NumpyArray,
    bits: int,
    key: NumpyArray | None = None,
    out: Array | None = None,
) -> Array:
    share = x / each_norm(torch.where(norms > 0, norms, 1.0), bucket, len(x))
    if key is None:
        codes = torch.searchsorted(uploaded(torch.from_numpy(between(levels)), x), share)
    else:
        table = uploaded(torch.from_numpy(levels), x)
        low = torch.searchsorted(table, share, right=True).sub_(1).clamp_(0, len(levels) - 2)
        below = table[low]
        codes = low + (uniform(key, len(x), x) < (share - below) / (table[low + 1] - below))
    written = packed(codes.to(torch.uint8), bits) if bits <= 8 else pack_bits(codes, bits)
    return written if out is None else out.copy_(written)


def decode_levels(buffer: Array, norms: Array, bucket: int, levels: NumpyArray, bits: int, count: int) -> Array:
    codes = unpacked(buffer, bits, count).long() if bits <= 8 else unpack_bits(buffer, bits, count)
    table = uploaded(torch.from_numpy(levels), buffer)
    return table[codes.clamp_(max=len(levels) - 1)].mul_(each_norm(finite_norms(norms), bucket, count))
