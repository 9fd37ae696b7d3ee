"""Coded vectors, compiled: each format has a kernel that decodes elements and adds them to its output.

An *adder* is a function that binds such a kernel to a vector, whose arrays are checked once. For any range of the
vector's elements it sets out = (out ± values)·factor or, without ``add``, out = ±values·factor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from hvdcompress.ops.numba._kernels import codes, floats, levels
from hvdcompress.ops.numba.arrays import ONE, plain
from hvdcompress.ops.numba.threads import in_ranges
from hvdcompress.ops.shared import filled
from hvdcompress.ops.vectors import Coded, Codes, Fields, Half, Sum
from hvdcompress.ops.vectors import NumpyArray as Array

_CACHED = 1 << 19  # number of elements that stay in the cache while the shares of all ranks are added to them
_ALIGN = 1 << 12  # threads start at multiples, which are the first codes of a byte, a word and a kernel's block
_MAX_WIDTH = 16  # maximum bits per field that the kernel can read

#: (out, index of the element out[0], add, sign ±1, factor) -> None
Adder = Callable[[Array, int, bool, np.float32, np.float32], None]


def write(out: Array, total: Coded, factor: float) -> bool:
    """Set out = factor·total. Return False, with ``out`` undefined, if no kernel accepts the vector."""
    adders = [adder(share) for share in (total.shares if isinstance(total, Sum) else [total])]
    if total.size != out.size or not plain(out) or None in adders:
        return False
    step = _CACHED if len(adders) > 1 else max(out.size, 1)

    def decode(begin: int, stop: int) -> None:
        # add all shares of some elements, which stay in the cache, before the next elements
        for start in range(begin, stop, step):
            part = out[start : min(start + step, stop)]
            for number, add in enumerate(adders):
                assert add is not None
                add(part, start, number > 0, ONE, np.float32(factor) if number == len(adders) - 1 else ONE)

    in_ranges(decode, out.size, _ALIGN)
    return True


def subtract(x: Array, own: Coded) -> bool:
    """Set x = x − own. Return False, with ``x`` unchanged, if no kernel accepts the vector."""
    add = adder(own)
    if own.size != x.size or not plain(x) or add is None:
        return False
    in_ranges(lambda start, stop: add(x[start:stop], start, True, -ONE, ONE), x.size, _ALIGN)
    return True


def adder(share: Any) -> Adder | None:
    """Return the adder of a coded vector or an array, or None if no kernel accepts it."""
    if isinstance(share, Codes):
        return _of_codes(share)
    if isinstance(share, Fields):
        return _of_fields(share)
    if isinstance(share, Half):
        return _of_half(share)
    return None if isinstance(share, Coded) or not plain(share) else _of_array(share)


def _of_codes(share: Codes) -> Adder | None:
    buffer, norms, bucket, table, bits, begin, size = share
    if not plain(buffer, dtype=np.uint8) or not plain(norms):
        return None
    if norms.size * bucket < begin + size or buffer.size * 8 < (begin + size) * bits:
        return None
    norm_bits = norms.view(np.int32)
    every = _levels(table.tobytes(), bits)

    def add_to(out: Array, first: int, add: bool, sign: np.float32, factor: np.float32) -> None:
        levels.add_levels(buffer, norm_bits, bucket, every, bits, begin + first, out, add, sign, factor)

    return add_to


@lru_cache
def _levels(table: bytes, bits: int) -> Array:
    """Return ``levels`` of ``kernels.levels.unpack`` for a table of levels, float32 as bytes."""
    given = np.frombuffer(table, np.float32)
    every = filled(given, 1 << bits, given[-1])
    if 8 % bits:
        return every
    codes = np.arange(256)[:, None] >> np.arange(0, 8, bits) & ((1 << bits) - 1)
    return every[codes].ravel()


def _of_fields(share: Fields) -> Adder | None:
    words, width, bound, scale, begin, size = share
    if not plain(words, dtype=np.int32) or width > _MAX_WIDTH or words.size * (32 // width) < begin + size:
        return None
    unit = scale[0] if size else ONE

    def add_to(out: Array, first: int, add: bool, sign: np.float32, factor: np.float32) -> None:
        codes.add_fields(words, width, bound, unit * sign, begin + first, out, add, factor)

    return add_to


def _of_half(share: Half) -> Adder | None:
    values = share.values
    scale = np.float32(share.scale)
    if not plain(values, dtype=values.dtype):
        return None
    kernel = floats.add_fp16 if values.dtype == np.float16 else floats.add_bf16
    bits = values.view(np.uint16)

    def add_to(out: Array, first: int, add: bool, sign: np.float32, factor: np.float32) -> None:
        kernel(bits[first : first + out.size], scale * sign, out, add, factor)

    return add_to


def _of_array(share: Array) -> Adder:
    def add_to(out: Array, first: int, add: bool, sign: np.float32, factor: np.float32) -> None:
        part = share[first : first + out.size]
        part = part if sign == ONE else -part
        if add:
            np.add(out, part, out=out)
        else:
            np.copyto(out, part)
        if factor != ONE:
            np.multiply(out, factor, out=out)

    return add_to
