"""Number formats of the values in a payload, and sums of values in them.

A codec writes [count] float32 values in a known number of bytes, and reads them::

    fp32                    unchanged
    fp16, bf16              rounded to 16 bits
    qsgd2 … qsgd8           stochastic quantization, bits per value (``parts/quantize.py``)
    rangefloat4 … 16[mM]    range floats, bits per value, M of them mantissa: by default chosen from the data
                            (``parts/rangefloat.py``)

Every method that sends values accepts these names. :func:`all_reduce` sums values over ranks: fp32 directly, fp16
divided by the number of ranks so that the sum stays in range, and all others, which no network can add, by
scatter-reduce (``parts/sums.py``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import Any

from hvdcompress.method import AllReduce, Array, Context, Values, Workspace
from hvdcompress.ops.scan import Halves
from hvdcompress.ops.spec import Ops
from hvdcompress.ops.vectors import Half
from hvdcompress.parts import sums
from hvdcompress.parts.quantize import StochasticCodec
from hvdcompress.parts.rangefloat import RangeFloatCodec
from hvdcompress.parts.sums import Codec, put

ALONE = ("fp32", "fp16")  #: formats in which neither a value nor its share of a sum depends on those sent with it
SUMMED_MAX = 65504.0 * (1 - 2**-9)  #: largest |x| in an fp16 sum, with room for the sum's own rounding


def _count_saturated(work: Workspace, count: Any) -> None:
    work.counters["saturated"] = work.counters.get("saturated", 0) + count


class Float32:
    """Values unchanged."""

    code = 0

    def num_bytes(self, count: int) -> int:
        return 4 * count

    def encode(self, x: Array, ctx: Context, work: Workspace, stream: int = 0, out: Array | None = None) -> Array:
        ops = work.ops
        return put([ops.to_bytes(x)], out, ops)

    def coded(self, buffer: Array, count: int, ops: Ops) -> Array:
        return self.decode(buffer, count, ops)

    def decode(self, buffer: Array, count: int, ops: Ops) -> Array:
        return ops.from_bytes(buffer, "float32")


class Float16:
    """IEEE half precision. Values beyond its range saturate and are counted in the ledger."""

    code = 1

    def num_bytes(self, count: int) -> int:
        return 2 * count

    def encode(self, x: Array, ctx: Context, work: Workspace, stream: int = 0, out: Array | None = None) -> Array:
        ops = work.ops
        half, saturated = ops.to_fp16(x, 1.0)
        _count_saturated(work, saturated)
        return put([ops.to_bytes(half)], out, ops)

    def coded(self, buffer: Array, count: int, ops: Ops) -> Half:
        return Half(ops.from_bytes(buffer, "float16"), 1.0)

    def decode(self, buffer: Array, count: int, ops: Ops) -> Array:
        return ops.from_fp16(ops.from_bytes(buffer, "float16"), 1.0)


class BFloat16:
    """bfloat16: the upper 16 bits of a float32, rounded to nearest even."""

    code = 2

    def num_bytes(self, count: int) -> int:
        return 2 * count

    def encode(self, x: Array, ctx: Context, work: Workspace, stream: int = 0, out: Array | None = None) -> Array:
        ops = work.ops
        return ops.to_bytes(ops.to_bf16(x)) if out is None else ops.to_bf16(x, out)

    def coded(self, buffer: Array, count: int, ops: Ops) -> Half:
        return Half(ops.from_bytes(buffer, "uint16"), 1.0)

    def decode(self, buffer: Array, count: int, ops: Ops) -> Array:
        return ops.from_bf16(ops.from_bytes(buffer, "uint16"))


@dataclass(frozen=True)
class InParts:
    """Writes the values of a bucket's tensors one tensor after another, each as if it were sent alone.

    The formats outside of :data:`ALONE` scale a value by others. Across tensors, what a tensor gets would depend on
    the tensors that it is joined with.

    Attributes:
        codec: The number format.
        counts: The number of values of each tensor of the bucket.
    """

    codec: Codec
    counts: tuple[int, ...]

    @property
    def code(self) -> int:
        """The number format's code."""
        return self.codec.code

    @cached_property
    def spans(self) -> list[tuple[slice, slice]]:
        """The values and the bytes of each tensor; bytes begin at multiples of 4."""
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

    def encode(self, x: Array, ctx: Context, work: Workspace, stream: int = 0, out: Array | None = None) -> Array:
        ops = work.ops
        out = ops.zeros(self.num_bytes(len(x)), "uint8", like=x) if out is None else out
        before = 0
        for index, (values, place) in enumerate(self.spans):
            if before < place.start:
                ops.fill(out[before : place.start], 0)
            self.codec.encode(x[values], replace(ctx, spec=ctx.spec.part(index)), work, stream, out[place])
            before = place.stop
        return out

    def coded(self, buffer: Array, count: int, ops: Ops) -> Array:
        return self.decode(buffer, count, ops)

    def decode(self, buffer: Array, count: int, ops: Ops) -> Array:
        return ops.concat(
            [self.codec.decode(buffer[place], values.stop - values.start, ops) for values, place in self.spans]
        )


_MADE: dict[str, Callable[..., Codec]] = {
    "fp32": lambda bits, mantissa: Float32(),
    "fp16": lambda bits, mantissa: Float16(),
    "bf16": lambda bits, mantissa: BFloat16(),
    "qsgd": lambda bits, mantissa: StochasticCodec(bits=bits),
    "rangefloat": lambda bits, mantissa: RangeFloatCodec(bits=bits, mantissa=mantissa),
}


@lru_cache(4096)
def codec_of_parts(values: Values, counts: tuple[int, ...]) -> Codec:
    """Return the codec of a bucket's values, of which each tensor has as many as ``counts`` says."""
    if values in ALONE or len(counts) < 2:
        return codec(values)
    return InParts(codec(values), counts)


@cache
def codec(values: Values) -> Codec:
    """Return the codec of a name such as "fp16", "qsgd4" or "rangefloat10m6"."""
    if values in _MADE:
        return _MADE[values](None, None)
    kind, bits, mantissa = re.fullmatch(r"([a-z]+)(\d+)(?:m(\d+))?", values).groups()  # type: ignore[union-attr]
    return _MADE[kind](int(bits), None if mantissa is None else int(mantissa))


def reduced_num_bytes(count: int, values: Values, world: int) -> int:
    """Return the payload bytes that a rank hands to collectives in :func:`all_reduce` of ``count`` values."""
    if values in ("fp32", "fp16"):
        return codec(values).num_bytes(count)
    return sums.reduced_num_bytes(count, codec(values), "scatter", world)


def all_reduce(
    x: Array, values: Values, ctx: Context, work: Workspace, stream: int = 0
) -> Generator[Any, Any, tuple[Array, Any]]:
    """Sum ``x`` over ranks in a number format.

    Args:
        x: float32 [count].
        values: the number format's name.
        ctx: rank, world, step and tensor.
        work: memory, findings and counters of this exchange, and the array ops.
        stream: a number that differs between the sums of one exchange, so that their random numbers differ.

    Yields:
        An all-reduce for fp32 and fp16; otherwise an all-to-all and an all-gather.

    Returns:
        The sum [count], and this rank's share of it after rounding [count], or None if ``ctx.needs_own`` is False. The
        shares of all ranks add up to the sum, so that error feedback loses nothing.
    """
    if values == "fp32":
        return (yield AllReduce(x)), x
    in_halves = values == "fp16"
    summing: Any = (
        sum_of_halves(x, ctx, work, stream) if in_halves else sums.scatter(x, codec(values), ctx, work, stream)
    )
    total, own = yield from summing
    ops = work.ops
    return ops.dense(total), None if own is None else ops.dense(own)


def halves(n: int, ctx: Context, work: Workspace, like: Array, stream: int = 0) -> Halves:
    """Return how values [n] are converted that :func:`sum_of_halves` sums: such that no sum leaves float16's range."""
    payload = work.buffer(f"halves.{stream}", n, "float16", like)
    return Halves(1.0 / ctx.world, SUMMED_MAX / ctx.world, payload)


def sum_of_halves(
    x: Array, ctx: Context, work: Workspace, stream: int = 0, saturated: Any = None
) -> Generator[Any, Any, tuple[Half, Half | None]]:
    """Do what :func:`all_reduce` does for fp16, and leave sum and share in float16.

    ``saturated``: how many values were clipped, if all of the vector's have been converted by :func:`halves` already.
    """
    how = halves(len(x) if saturated is None else ctx.spec.size, ctx, work, x, stream)
    _count_saturated(work, work.ops.to_fp16(x, *how)[1] if saturated is None else saturated)
    total = yield AllReduce(how.out, may_overwrite=not ctx.needs_own)
    return Half(total, ctx.world), Half(how.out, ctx.world) if ctx.needs_own else None
