"""Coded vectors, compiled: each kind has a kernel that decodes elements and adds them to what is there.

An *adder* is that kernel with a vector bound to it: what it needs of the vector is looked up, and checked, once. It
sets out = (out ± values)·factor or, without ``add``, out = ±values·factor, for any consecutive elements of the vector.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from hvdcompress.ops.numba._kernels import codes, floats
from hvdcompress.ops.numba.arrays import ONE, plain
from hvdcompress.ops.numba.threads import in_ranges
from hvdcompress.ops.vectors import Coded, Codes, Fields, Half, Sum
from hvdcompress.ops.vectors import NumpyArray as Array

_CACHED = 1 << 19  # elements that stay in a cache while all shares of them are added
_ALIGN = 1 << 12  # elements: what threads begin at is the first code of a byte, of a word and of a kernel's block
_EXACT = np.uint32(0xFFFFFF00)  # float32 numbers of 16 bits: their products with levels are exact
_WIDEST = 16  # bits of a field that the kernel reads

Adder = Callable[[Array, int, bool, np.float32, np.float32], None]  # out, first (out[0]'s element), add, ±1, factor


def write(out: Array, total: Coded, factor: float) -> bool:
    """Set out = factor·total. Returns False, with ``out`` undefined, for what the kernels cannot take."""
    adders = [adder(share) for share in (total.shares if isinstance(total, Sum) else [total])]
    if total.size != out.size or not plain(out) or None in adders:
        return False
    step = _CACHED if len(adders) > 1 else max(out.size, 1)

    def decode(begin: int, stop: int) -> None:
        for start in range(begin, stop, step):  # all shares of some elements, then the next: memory is written once
            part = out[start : min(start + step, stop)]
            for number, add in enumerate(adders):
                assert add is not None
                add(part, start, number > 0, ONE, np.float32(factor) if number == len(adders) - 1 else ONE)

    in_ranges(decode, out.size, _ALIGN)
    return True


def subtract(x: Array, own: Coded) -> bool:
    """Set x = x − own. Returns False, with ``x`` unchanged, for what the kernel cannot take."""
    add = adder(own)
    if own.size != x.size or not plain(x) or add is None:
        return False
    in_ranges(lambda start, stop: add(x[start:stop], start, True, -ONE, ONE), x.size, _ALIGN)
    return True


def adder(share: Any) -> Adder | None:
    """Return the adder of a coded vector or an array; None: there is none."""
    if isinstance(share, Codes):
        return _of_codes(share)
    if isinstance(share, Fields):
        return _of_fields(share)
    if isinstance(share, Half):
        return _of_half(share)
    return None if isinstance(share, Coded) or not plain(share) else _of_array(share)


def _of_codes(share: Codes) -> Adder | None:
    buffer, norms, bucket, bits, begin, size = share
    stop = begin + size
    bucket = bucket if bits > 1 else max(stop, 1)
    if not plain(buffer, dtype=np.uint8) or not plain(norms):
        return None
    if norms.size * bucket < stop or buffer.size * 8 < stop * bits:
        return None
    (high, low), norm_bits = _parts(bits), norms.view(np.int32)

    def add_to(out: Array, first: int, add: bool, sign: np.float32, factor: np.float32) -> None:
        codes.add_codes(buffer, norm_bits, bucket, bits, high, low, begin + first, out, add, sign, factor)

    return add_to


@cache
def _parts(bits: int) -> tuple[np.float32, np.float32]:
    """Return two float32 numbers whose sum is 1/s."""
    whole = 1.0 / max((1 << (bits - 1)) - 1, 1)
    [high] = (np.array([whole], np.float32).view(np.uint32) & _EXACT).view(np.float32)
    return high, np.float32(whole - float(high))


def _of_fields(share: Fields) -> Adder | None:
    words, width, bound, scale, begin, size = share
    if not plain(words, dtype=np.int32) or width > _WIDEST or words.size * (32 // width) < begin + size:
        return None
    unit = scale[0] if size else ONE

    def add_to(out: Array, first: int, add: bool, sign: np.float32, factor: np.float32) -> None:
        codes.add_fields(words, width, bound, unit * sign, begin + first, out, add, factor)

    return add_to


def _of_half(share: Half) -> Adder | None:
    values, scale = share.values, np.float32(share.scale)
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
