"""What a sharded model exchanges: vectors [p·m] of p shards, of which rank r owns shard r.

*reduce-scatter*: each rank encodes every shard and sends it to its owner, who decodes and adds the p shards in float32,
in the order of the ranks. Unlike in an all-reduce, the sum is not encoded again.

*all-gather*: each rank encodes its shard once and sends it to all others. All ranks decode all shards. The owner
decodes its own, too, so that all ranks have the same values.

A shard has a part of each tensor. Each part is encoded by itself, so that tensors of different magnitudes share no
scale. The payload of a shard is a float32 that is NaN if the shard has a NaN or an Inf, and then the parts; each begins
at a multiple of 4 bytes. If the float32 is NaN, so are all values that are decoded from the shard.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from hvdcompress.method import AllGather, AllToAll, Array, Context, Workspace
from hvdcompress.ops.spec import Ops
from hvdcompress.ops.vectors import Sum
from hvdcompress.parts import wire
from hvdcompress.parts.codecs import PLAIN
from hvdcompress.parts.sums import Codec

NAN = np.full(1, np.nan, np.float32)
_FLAG = 4  # bytes of the float32 before the parts


@dataclass(frozen=True)
class ShardFormat:
    """The payload of one shard.

    Attributes:
        parts: for each part, its codec and its number of values.
    """

    parts: tuple[tuple[Codec, int], ...]

    @cached_property
    def spans(self) -> list[tuple[Codec, slice, slice]]:
        """For each part, its codec, its values in the shard and its bytes in the payload."""
        found = []
        first, start = 0, _FLAG
        for codec, count in self.parts:
            stop = start + codec.num_bytes(count)
            found.append((codec, slice(first, first + count), slice(start, stop)))
            first += count
            start = stop + -stop % 4
        return found

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of a payload."""
        stop = self.spans[-1][2].stop
        return stop + -stop % 4

    def encode(self, x: Array, out: Array, ctx: Context, work: Workspace, number: int = 0) -> None:
        """Encode a shard.

        Args:
            x: float32 [m].
            out: uint8 [num_bytes] that receives the payload.
            ctx: rank, step, tensor and seed, which select the random streams.
            work: buffers and the array ops.
            number: index of the shard among those that this rank encodes.
        """
        ops = work.ops
        flag = ops.zeros(1, "float32", like=x)
        ops.keep_if(ops.all_finite(x), flag, ops.asarray(NAN, like=x))
        out[:_FLAG] = ops.to_bytes(flag)
        before = _FLAG
        for index, (codec, values, place) in enumerate(self.spans):
            out[before : place.start] = 0
            codec.encode(x[values], ctx, work, number * len(self.spans) + index, out[place])
            before = place.stop
        out[before:] = 0

    def add(self, payloads: Sequence[Array], out: Array, factor: float, ops: Ops) -> None:
        """Set out = factor · the sum of decoded payloads.

        Args:
            payloads: of one or several ranks; uint8.
            out: float32 [m].
            factor: rounded to float32 first.
            ops: the array backend.

        Raises:
            WireError: a payload has a wrong number of bytes.
        """
        for payload in payloads:
            if len(payload) != self.num_bytes:
                raise wire.WireError(f"received a shard of {len(payload)} bytes, expected {self.num_bytes}")
        for codec, values, place in self.spans:
            coded = [codec.coded(payload[place], values.stop - values.start, ops) for payload in payloads]
            ops.write(out[values], Sum(coded), factor)
        flag = ops.add_all([ops.from_bytes(payload[:_FLAG], "float32") for payload in payloads])
        if ops.all_finite(flag) is not True:  # on a device, the host does not know it
            out += flag

    def subtract(self, payload: Array, x: Array, ops: Ops) -> None:
        """Subtract a decoded payload from a shard x [m], in place."""
        for codec, values, place in self.spans:
            ops.subtract(x[values], codec.coded(payload[place], values.stop - values.start, ops), 1.0)


@lru_cache(4096)
def format_of(codec: Codec, parts: tuple[tuple[int, bool], ...]) -> ShardFormat:
    """Return the format of shards with these parts; parts are encoded as one where that changes no value.

    Args:
        codec: the number format.
        parts: for each part, its number of values, and whether it stays in float32.
    """
    joined: list[tuple[Codec, int]] = []
    for count, exact in parts:
        each = PLAIN["fp32"] if exact else codec
        before, length = joined[-1] if joined else (None, 0)
        if before is each and each.unit and length % each.unit == 0:
            joined[-1] = each, length + count
        elif count:
            joined.append((each, count))
    return ShardFormat(tuple(joined))


def reduce_scatter(
    x: Array, out: Array, factor: float, form: ShardFormat, ctx: Context, work: Workspace, keeps_error: bool = False
) -> Generator[AllToAll, Iterable[Array], None]:
    """Sum the vectors of all ranks; each rank gets its shard of the sum.

    Args:
        x: float32 [p·m]; read only without ``keeps_error``.
        out: float32 [m] that receives factor · the sum.
        factor: for example 1/p for the mean.
        form: the format of a shard.
        ctx: rank, world_size, step and tensor.
        work: buffers and the array ops.
        keeps_error: whether x becomes x minus what was sent of it.

    Yields:
        An all-to-all.
    """
    m, width = len(out), form.num_bytes
    payload = work.buffer("sent", width * ctx.world_size, "uint8", x)
    mine = [(x[r * m : (r + 1) * m], payload[r * width : (r + 1) * width]) for r in range(ctx.world_size)]
    for owner, (values, place) in enumerate(mine):
        form.encode(values, place, ctx, work, owner)
    form.add(list((yield AllToAll(payload))), out, factor, work.ops)
    for values, place in mine if keeps_error else ():
        form.subtract(place, values, work.ops)


def all_gather(
    x: Array, out: Array, form: ShardFormat, ctx: Context, work: Workspace
) -> Generator[AllGather, Iterable[Array], None]:
    """Gather the shards of all ranks.

    Args:
        x: this rank's shard, float32 [m]; may be a part of ``out``.
        out: float32 [p·m] that receives the decoded shards of all ranks, this one's too.
        form: the format of a shard.
        ctx: rank, world_size, step and tensor.
        work: buffers and the array ops.

    Yields:
        An all-gather.
    """
    m = len(x)
    payload = work.buffer("sent", form.num_bytes, "uint8", x)
    form.encode(x, payload, ctx, work)
    for rank, each in enumerate((yield AllGather(payload, fixed_length=True))):
        form.add([each], out[rank * m : (rank + 1) * m], 1.0, work.ops)
