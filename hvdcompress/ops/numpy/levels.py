"""Levels: values in units of a norm, rounded to a table (documented in :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

import numpy as np

from hvdcompress.ops.numpy.bits import pack_bits, unpack_bits
from hvdcompress.ops.numpy.codes import finite_norms, uniform
from hvdcompress.ops.shared import between
from hvdcompress.ops.vectors import NumpyArray as Array


def encode_levels(
    x: Array, norms: Array, bucket: int, levels: Array, bits: int, key: Array | None = None, out: Array | None = None
) -> Array:
    with np.errstate(invalid="ignore", over="ignore"):  # NaN and Inf: the step will be discarded
        share = x / np.where(norms > 0, norms, np.float32(1))[np.arange(x.size) // bucket]
        if key is None:
            codes = np.searchsorted(between(levels), share)
        else:
            low = np.clip(np.searchsorted(levels, share, side="right") - 1, 0, levels.size - 2)
            codes = low + (uniform(key, x.size, x) < (share - levels[low]) / (levels[low + 1] - levels[low]))
    packed = pack_bits(codes, bits)
    if out is None:
        return packed
    out[...] = packed
    return out


def decode_levels(buffer: Array, norms: Array, bucket: int, levels: Array, bits: int, count: int) -> Array:
    codes = np.minimum(unpack_bits(buffer, bits, count), levels.size - 1)
    return levels[codes] * finite_norms(norms)[np.arange(count) // bucket]
