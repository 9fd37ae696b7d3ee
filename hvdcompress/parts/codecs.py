"""The values of a payload: how they are written, and how they are summed.

A codec turns [count] float32 into a known number of bytes and back::

    fp32                    as they are
    fp16, bf16              rounded to half precision
    qsgd2 … qsgd8           stochastic quantization to so many bits (``parts/quantize.py``)
    rangefloat4 … 16[mM]    a float of so many bits, its range taken from the data (``parts/rangefloat.py``)

Any method that sends values takes them all by these names. :func:`all_reduce` sums values over ranks: fp32
as they are; fp16 divided by the number of workers first, so that a sum stays in range for any world; the
others, which no network can add, by scatter-reduce (``parts/sums.py``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import cache
from typing import Any

from hvdcompress.method import AllReduce, Array, Context, Values
from hvdcompress.parts import sums
from hvdcompress.parts.quantize import StochasticCodec
from hvdcompress.parts.rangefloat import RangeFloatCodec
from hvdcompress.parts.sums import Codec

SUMMED_MAX = 65504.0 * (1 - 2**-9)  #: largest |x| in an fp16 sum: room for the sum's own rounding


def _count_saturated(ctx: Context, count: Any) -> None:
    ctx.counters["saturated"] = ctx.counters.get("saturated", 0) + count


class Float32:
    """As they are."""

    code = 0

    def num_bytes(self, count: int) -> int:
        return 4 * count

    def encode(self, x: Array, ctx: Context, ops: Any, stream: int = 0) -> Array:
        return ops.to_bytes(x)

    def decode(self, buffer: Array, count: int, ops: Any) -> Array:
        return ops.from_bytes(buffer, "float32")


class Float16:
    """IEEE half precision; a value beyond its range saturates and is counted."""

    code = 1

    def num_bytes(self, count: int) -> int:
        return 2 * count

    def encode(self, x: Array, ctx: Context, ops: Any, stream: int = 0) -> Array:
        half, saturated = ops.to_fp16(x, 1.0)
        _count_saturated(ctx, saturated)
        return ops.to_bytes(half)

    def decode(self, buffer: Array, count: int, ops: Any) -> Array:
        return ops.from_fp16(ops.from_bytes(buffer, "float16"), 1.0)


class BFloat16:
    """The upper half of a float32, rounded to nearest even."""

    code = 2

    def num_bytes(self, count: int) -> int:
        return 2 * count

    def encode(self, x: Array, ctx: Context, ops: Any, stream: int = 0) -> Array:
        return ops.to_bytes(ops.to_bf16(x))

    def decode(self, buffer: Array, count: int, ops: Any) -> Array:
        return ops.from_bf16(ops.from_bytes(buffer, "uint16"))


_MADE: dict[str, Callable[..., Codec]] = {
    "fp32": lambda bits, mantissa: Float32(),
    "fp16": lambda bits, mantissa: Float16(),
    "bf16": lambda bits, mantissa: BFloat16(),
    "qsgd": lambda bits, mantissa: StochasticCodec(bits=bits),
    "rangefloat": lambda bits, mantissa: RangeFloatCodec(bits=bits, mantissa=mantissa),
}


@cache
def codec(values: Values) -> Codec:
    """The codec of a name such as "fp16", "qsgd4" or "rangefloat10m6"."""
    if values in _MADE:
        return _MADE[values](None, None)
    kind, bits, mantissa = re.fullmatch(r"([a-z]+)(\d+)(?:m(\d+))?", values).groups()  # type: ignore[union-attr]
    return _MADE[kind](int(bits), None if mantissa is None else int(mantissa))


def reduced_num_bytes(count: int, values: Values, world: int) -> int:
    """What :func:`all_reduce` of ``count`` values hands to its collectives."""
    if values in ("fp32", "fp16"):
        return codec(values).num_bytes(count)
    return sums.reduced_num_bytes(count, codec(values), "scatter", world)


def all_reduce(
    x: Array, values: Values, ctx: Context, ops: Any, stream: int = 0
) -> Generator[Any, Any, tuple[Array, Any]]:
    """The sum of ``x`` [count] over ranks, and this rank's share of it after rounding: both like ``x``.

    The shares of all ranks add up to the sum, so that feedback loses nothing; None where nobody asks for them.
    ``stream`` tells apart the random numbers of several sums in one exchange.
    """
    if values == "fp32":
        return (yield AllReduce(x)), x
    if values == "fp16":
        payload, saturated = ops.to_fp16(x, 1.0 / ctx.world, SUMMED_MAX / ctx.world)
        _count_saturated(ctx, saturated)
        total = yield AllReduce(payload)
        return ops.from_fp16(total, ctx.world), ops.from_fp16(payload, ctx.world) if ctx.needs_own else None
    return (yield from sums.scatter(x, codec(values), ctx, ops, stream))
