"""Number formats of the values in a payload, and sums of values in them.

A codec encodes float32 values [count] in a number of bytes that depends only on count::

    fp32                    unchanged
    fp16, bf16              rounded to 16 bits
    qsgd2 … qsgd8           stochastic quantization, bits per value (``parts/quantize.py``)
    int4, int8, fp8_e4m3, fp8_e5m2, dynamic8, natural4, natural
                            nearest of a few levels; for natural, one of two at random (``parts/levels.py``)
    rangefloat4 … 16[mM]    range floats, bits per value, M mantissa bits; without M they are chosen from the data
                            (``parts/rangefloat.py``)

Every method that sends values accepts these names. :func:`all_reduce` sums values over ranks: fp32 directly; fp16 after
a division by the number of ranks, which keeps the sum in range; all other formats, which networks cannot add, by
scatter-reduce (``parts/sums.py``).
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import Any

from hvdcompress.method import AllReduce, Array, Context, Values, Workspace
from hvdcompress.ops.scan import Halves
from hvdcompress.ops.spec import Ops
from hvdcompress.ops.vectors import Coded, Half
from hvdcompress.parts import sums
from hvdcompress.parts.levels import FORMATS, LevelCodec
from hvdcompress.parts.quantize import StochasticCodec
from hvdcompress.parts.rangefloat import RangeFloatCodec
from hvdcompress.parts.sums import Codec

ELEMENTWISE = ("fp32", "fp16")  #: formats in which a value, and its share of a sum, depends on no other value
SUMMED_MAX = 65504.0 * (1 - 2**-9)  #: largest |x| in an fp16 sum, with a margin for the rounding of the sum


def _count_saturated(work: Workspace, count: Any) -> None:
    work.counters["saturated"] = work.counters.get("saturated", 0) + count


class Float32(Codec):
    """Float32, unchanged."""

    code = 0
    bits = 32

    def write(self, x: Array, head: Array, body: Array, ctx: Context, work: Workspace, stream: int) -> None:
        body[:] = work.ops.to_bytes(x)

    def read(self, head: Array, body: Array, count: int, ops: Ops) -> Array:
        return ops.from_bytes(body, "float32")


class Float16(Codec):
    """IEEE half precision. Values outside of its range are clipped, and counted in the ledger as "saturated"."""

    code = 1
    bits = 16

    def write(self, x: Array, head: Array, body: Array, ctx: Context, work: Workspace, stream: int) -> None:
        half, saturated = work.ops.to_fp16(x, 1.0)
        _count_saturated(work, saturated)
        body[:] = work.ops.to_bytes(half)

    def read(self, head: Array, body: Array, count: int, ops: Ops) -> Half:
        return Half(ops.from_bytes(body, "float16"), 1.0)


class BFloat16(Codec):
    """bfloat16: the upper 16 bits of a float32, rounded to nearest even."""

    code = 2
    bits = 16

    def write(self, x: Array, head: Array, body: Array, ctx: Context, work: Workspace, stream: int) -> None:
        work.ops.to_bf16(x, body)

    def read(self, head: Array, body: Array, count: int, ops: Ops) -> Half:
        return Half(ops.from_bytes(body, "int16"), 1.0)


@dataclass(frozen=True)
class InParts(Codec):
    """Codec for the values of a bucket: it encodes each tensor's values separately.

    Number formats outside of :data:`ELEMENTWISE` scale several values by a common factor. If values of different
    tensors shared a factor, the result of a tensor would depend on the other tensors in its bucket.

    Attributes:
        codec: the number format.
        counts: for each tensor of the bucket, its number of values.
    """

    codec: Codec
    counts: tuple[int, ...]

    @property
    def code(self) -> int:
        return self.codec.code

    @property
    def bits(self) -> int:
        return self.codec.bits

    @cached_property
    def spans(self) -> list[tuple[slice, slice]]:
        """For each tensor, its (values, bytes); the bytes of each tensor begin at a multiple of 4."""
        found = []
        first = start = 0
        for count in self.counts:
            width = self.codec.num_bytes(count)
            found.append((slice(first, first + count), slice(start, start + width)))
            first += count
            start += width + -width % 4
        return found

    def num_bytes(self, count: int) -> int:
        return self.spans[-1][1].stop

    def write(self, x: Array, head: Array, body: Array, ctx: Context, work: Workspace, stream: int) -> None:
        before = 0
        for member, (values, place) in zip(ctx.spec.members, self.spans, strict=True):
            body[before : place.start] = 0
            self.codec.encode(x[values], replace(ctx, spec=member), work, stream, body[place])
            before = place.stop

    def read(self, head: Array, body: Array, count: int, ops: Ops) -> Array:
        return ops.concat([self.codec.decode(body[place], v.stop - v.start, ops) for v, place in self.spans])


PLAIN: dict[str, Codec] = {"fp32": Float32(), "fp16": Float16(), "bf16": BFloat16()}


@lru_cache(4096)
def codec_of_parts(values: Values, counts: tuple[int, ...]) -> Codec:
    """Return the codec for the values of a bucket whose tensors have ``counts`` values each."""
    if values in ELEMENTWISE or len(counts) < 2:
        return codec(values)
    return InParts(codec(values), counts)


@cache
def codec(values: Values) -> Codec:
    """Return the codec for a name such as "fp16", "qsgd4" or "rangefloat10m6"."""
    if values in PLAIN:
        return PLAIN[values]
    if values in FORMATS:
        return LevelCodec(values, rounding="stochastic" if values.startswith("natural") else "nearest")
    if values.startswith("qsgd"):
        return StochasticCodec(bits=int(values.removeprefix("qsgd")))
    bits, _, mantissa = values.removeprefix("rangefloat").partition("m")
    return RangeFloatCodec(bits=int(bits), mantissa=int(mantissa) if mantissa else None)


def reduced_num_bytes(count: int, values: Values, world_size: int) -> int:
    """Return the payload bytes that a rank passes to collectives in :func:`all_reduce` of ``count`` values."""
    if values in ELEMENTWISE:
        return codec(values).num_bytes(count)
    return sums.reduced_num_bytes(count, codec(values), "scatter", world_size)


def all_reduce(
    x: Array, values: Values, ctx: Context, work: Workspace, stream: int = 0
) -> Generator[Any, Any, tuple[Array, Any]]:
    """Sum ``x`` over ranks in a number format.

    Args:
        x: float32 [count].
        values: name of the number format.
        ctx: rank, world_size, step and tensor.
        work: buffers, scan results and counters of this exchange, and the array ops.
        stream: index of the sum within the exchange, so that each sum has its own random numbers.

    Yields:
        An all-reduce for fp32 and fp16; otherwise an all-to-all and an all-gather.

    Returns:
        The sum [count], and this rank's share of it after rounding [count], or None if ``ctx.needs_own`` is False. The
        shares of all ranks add up to the sum exactly, so error feedback loses nothing.
    """
    if values == "fp32":
        return (yield AllReduce(x)), x
    if values == "fp16":
        total, own = yield from sum_of_halves(x, ctx, work, stream)
    else:
        total, own = yield from sums.scatter(x, codec(values), ctx, work, stream)
    ops = work.ops
    return ops.dense(total), None if own is None else ops.dense(own)


def halves(n: int, ctx: Context, work: Workspace, like: Array, stream: int = 0) -> Halves:
    """Return the fp16 conversion for :func:`sum_of_halves` of values [n]. No sum over ranks can overflow."""
    payload = work.buffer(f"halves.{stream}", n, "float16", like)
    return Halves(1.0 / ctx.world_size, SUMMED_MAX / ctx.world_size, payload)


def sum_of_halves(
    x: Array, ctx: Context, work: Workspace, stream: int = 0, saturated: Any = None
) -> Generator[Any, Any, tuple[Coded, Coded | None]]:
    """Sum ``x`` over ranks in fp16, as :func:`all_reduce` does, but return sum and share in fp16.

    Args:
        x: float32 [count].
        ctx: rank, world_size, step and tensor.
        work: buffers, scan results and counters of this exchange, and the array ops.
        stream: index of the sum within the exchange.
        saturated: number of clipped values, if the scan has already converted all values by :func:`halves`.
    """
    # If the scan has written the values into this buffer already, x may be a part of the bucket only
    conversion = halves(len(x) if saturated is None else ctx.spec.size, ctx, work, x, stream)
    if saturated is None:
        _, saturated = work.ops.to_fp16(x, *conversion)
    _count_saturated(work, saturated)
    total = yield AllReduce(conversion.out, may_overwrite=not ctx.needs_own)
    return Half(total, ctx.world_size), Half(conversion.out, ctx.world_size) if ctx.needs_own else None
