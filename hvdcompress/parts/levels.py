"""Values of a few bits that share a scale: each value becomes the index of a level in a fixed table.

The values are divided into blocks of B, each with its largest magnitude as a scale, in float32::

    v ≈ s · levels[q],    s = max |v| of the block,    levels from −1 to 1

========== ==== ==================================================================================================
format     bits levels
========== ==== ==================================================================================================
int4       4    −7/7, …, 7/7: integers, as in 4-bit LoCo (Xie et al. 2024, arXiv 2407.04480) and SDP4Bit
int8       8    −127/127, …, 127/127
fp8_e4m3   8    the 253 finite numbers of FP8 E4M3, divided by 448 (Micikevicius et al. 2022, arXiv 2209.05433)
fp8_e5m2   8    the 247 finite numbers of FP8 E5M2, divided by 57344
dynamic8   8    0, 1, and in the decade 10^(i−7) … 10^(i−6) the middles of 2^i equal parts, with both signs, i = 0 … 6:
                a dynamic tree of 8 bits (Dettmers 2016, arXiv 1511.04561; blocks: Dettmers et al. 2022, arXiv
                2110.02861)
natural4   4    0 and ±2^−6, …, ±1: natural dithering (Horváth et al. 2019, arXiv 1905.10988, §4)
natural    9    0 and ±2^−126, …, ±2^127, without a scale: natural compression (same paper, §2)
========== ==== ==================================================================================================

Rounding is to the nearest level, or random and unbiased: v between the levels a and b becomes b with the probability
(v − a)/(b − a), drawn by each rank for itself. dynamic8 has no level −1, so −s becomes −0.993·s. As names of
``values``, natural and natural4 are random, as in their paper; random int4 and int8 are qsgd4 and qsgd8.

An index counts levels from the lowest one; it is not the bit pattern of an FP8 number, so that zero has one index.
The scale is a float32: 16 bits would save 16/B of a bit per value (a 16th of a bit for B = 256), and the largest
magnitude would no longer be a level.

Bytes: 4 per block (not for natural) + ⌈count·bits/8⌉.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

import numpy as np

from hvdcompress.method import Array, Context, Workspace
from hvdcompress.ops.spec import Ops
from hvdcompress.ops.vectors import Codes, NumpyArray
from hvdcompress.parts import seed
from hvdcompress.parts.sums import Codec

Rounding = Literal["nearest", "stochastic"]
BLOCK = 256  #: values per scale, unless another number is given


class Format(NamedTuple):
    """Number format."""

    bits: int  #: bits per value
    code: int  #: the format in the wire header
    positive: Callable[[], NumpyArray]  #: returns the positive levels, ascending
    scaled: bool = True  #: whether values are divided by the scale of their block


def _float8(mantissa: int, bias: int, last: int) -> NumpyArray:
    """Return the positive numbers of an 8-bit float up to the one with the bits ``last``, divided by that one."""
    bits = np.arange(1, last + 1)
    exponent, fraction = bits >> mantissa, bits & ((1 << mantissa) - 1)
    number = np.ldexp((exponent > 0) + fraction / (1 << mantissa), np.maximum(exponent, 1) - bias)
    return number / number[-1]


def _dynamic() -> NumpyArray:
    """Return the positive levels of the dynamic tree: in each decade, the middles of 2^i equal parts; and 1."""
    decades = [10.0 ** (i - 6) * (0.1 + 0.9 * (np.arange(2**i) + 0.5) / 2**i) for i in range(7)]
    return np.concatenate([*decades, [1.0]])


FORMATS: dict[str, Format] = {
    "int4": Format(4, 7, lambda: np.arange(1, 8) / 7),
    "int8": Format(8, 8, lambda: np.arange(1, 128) / 127),
    "fp8_e4m3": Format(8, 9, lambda: _float8(3, 7, 0x7E)),
    "fp8_e5m2": Format(8, 10, lambda: _float8(2, 15, 0x7B)),
    "dynamic8": Format(8, 11, _dynamic),
    "natural4": Format(4, 13, lambda: 2.0 ** np.arange(-6, 1)),
    "natural": Format(9, 12, lambda: 2.0 ** np.arange(-126, 128), scaled=False),
}


@cache
def levels(name: str) -> NumpyArray:
    """Return the levels of a format, ascending [m] float32.

    >>> levels("int4")[-3:].tolist(), len(levels("fp8_e4m3")), len(levels("dynamic8"))
    ([0.7142857313156128, 0.8571428656578064, 1.0], 253, 256)
    """
    positive = FORMATS[name].positive()
    negative = -positive[-2::-1] if name == "dynamic8" else -positive[::-1]  # −1 would be the 257th level
    return np.concatenate([negative, [0.0], positive]).astype(np.float32)


@dataclass(frozen=True)
class LevelCodec(Codec):
    """Codec that stores float32 values as indices of levels, in blocks with one scale each."""

    name: str = "int8"  #: of the format
    block: int = BLOCK  #: values per scale
    rounding: Rounding = "nearest"

    @property
    def code(self) -> int:
        return FORMATS[self.name].code

    @property
    def bits(self) -> int:
        return FORMATS[self.name].bits

    @property
    def unit(self) -> int:
        return self._shared(1)

    def head_bytes(self, count: int) -> int:
        return 4 * -(-count // self.block) if FORMATS[self.name].scaled else 0

    def write(self, x: Array, head: Array, body: Array, ctx: Context, work: Workspace, stream: int) -> None:
        ops = work.ops
        key = seed.private_key(ctx, stream) if self.rounding == "stochastic" else None
        scales = ops.bucket_norms(x, self.block, "max") if FORMATS[self.name].scaled else _one(x, ops)
        if FORMATS[self.name].scaled:
            head[:] = ops.to_bytes(scales)
        ops.encode_levels(x, scales, self._shared(len(x)), levels(self.name), self.bits, key, body)

    def read(self, head: Array, body: Array, count: int, ops: Ops) -> Codes:
        scales = ops.from_bytes(head, "float32") if FORMATS[self.name].scaled else _one(body, ops)
        return Codes(body, scales, self._shared(count), levels(self.name), self.bits, 0, count)

    def _shared(self, count: int) -> int:
        """Return the number of values that share a scale."""
        return self.block if FORMATS[self.name].scaled else max(count, 1)


def _one(like: Array, ops: Ops) -> Array:
    """Return the scale of a format without scales."""
    return ops.asarray(np.ones(1, np.float32), like)
