"""Codes, compiled: random rounding to levels (see :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

import numpy as np

from hvdcompress.ops import numpy as reference
from hvdcompress.ops.numba._kernels import codes as kernels
from hvdcompress.ops.numba.arrays import plain
from hvdcompress.ops.numpy.codes import finite_norms
from hvdcompress.ops.shared import level_values
from hvdcompress.ops.spec import NumpyArray as Array


def quantize(x: Array, norms: Array, bucket: int, bits: int, key: Array) -> Array:
    if not plain(x) or norms.size * bucket < x.size:
        return reference.quantize(x, norms, bucket, bits, key)
    out, safe = np.empty(-(-x.size * bits // 8), np.uint8), np.where(norms > 0, norms, np.float32(1))
    kernels.quantize(x, x.view(np.uint32), safe, bucket, bits, key[0], out)
    return out


def dequantize(
    buffer: Array,
    norms: Array,
    bucket: int,
    bits: int,
    count: int,
    out: Array | None = None,
    add: bool = False,
) -> Array:
    kept = np.empty(count, np.float32) if out is None else out
    if not plain(buffer, dtype=np.uint8) or not plain(kept) or kept.size != count or norms.size * bucket < count:
        return reference.dequantize(buffer, norms, bucket, bits, count, out, add)
    kernels.dequantize(buffer, finite_norms(norms), bucket, bits, level_values(bits), kept, add)
    return kept
