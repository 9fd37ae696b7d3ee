"""Sums of tensors in number formats that networks cannot add.

*gather*: each rank receives the codes of all p ranks, decodes and adds them. It receives p − 1 payloads.

*scatter*: a scatter-reduce. Rank r receives shard r of every rank, decodes and adds the shards, encodes the sum and
sends it to all ranks. For any number of ranks, a rank sends and receives about two payloads. The second encoding has a
rounding error, too; rank r includes it in its own share, so that the shares still add up to the sum.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdcompress.method import (
    AllGather,
    AllToAll,
    Array,
    Communication,
    Context,
    Method,
    Reduced,
    Route,
    TensorSpec,
    Workspace,
)
from hvdcompress.ops.spec import Ops
from hvdcompress.ops.vectors import Coded, Joined, Sum
from hvdcompress.parts import wire


class Codec(ABC):
    """Number format: encodes float32 [count] in a number of bytes that depends only on ``count``.

    The payload consists of a head, such as the scales of the values, and ``bits`` bits per value.
    """

    @property
    @abstractmethod
    def code(self) -> int:
        """The id of the format in the wire header, 0 to 15."""

    @property
    @abstractmethod
    def bits(self) -> int:
        """Bits per value, without the head."""

    def head_bytes(self, count: int) -> int:
        """Return the bytes before the values."""
        return 0

    @property
    def unit(self) -> int | None:
        """Number of values that are encoded together, such as those of a block; None: all values."""
        return 1 if self.head_bytes(1) == 0 else None

    @abstractmethod
    def write(self, x: Array, head: Array, body: Array, ctx: Context, work: Workspace, stream: int) -> None:
        """Encode values into the two parts of a payload; see :meth:`encode`."""

    @abstractmethod
    def read(self, head: Array, body: Array, count: int, ops: Ops) -> Array | Coded:
        """Return values [count] from the two parts of a payload; see :meth:`coded`."""

    def num_bytes(self, count: int) -> int:
        """Return the bytes of ``count`` encoded values."""
        return self.head_bytes(count) + -(-count * self.bits // 8)

    def encode(self, x: Array, ctx: Context, work: Workspace, stream: int = 0, out: Array | None = None) -> Array:
        """Encode values.

        Args:
            x: float32 [count].
            ctx: rank, step, tensor and seed, which select the random stream.
            work: the counters and the array ops.
            stream: index of the call within the exchange, so that each call has its own random numbers.
            out: uint8 [num_bytes(count)] that receives the result; by default a new array.

        Returns:
            uint8 [num_bytes(count)].
        """
        out = work.ops.zeros(self.num_bytes(len(x)), "uint8", like=x) if out is None else out
        edge = self.head_bytes(len(x))
        self.write(x, out[:edge], out[edge:], ctx, work, stream)
        return out

    def coded(self, buffer: Array, count: int, ops: Ops) -> Array | Coded:
        """Check encoded values like :meth:`decode`, but leave decoding to the function that writes them, if possible.

        Args:
            buffer: uint8 [num_bytes(count)]. It is read when the values are written.
            count: number of values.
            ops: the array backend.

        Returns:
            The values [count]; already decoded if the array ops cannot decode the format while writing.

        Raises:
            WireError: the number of bytes is wrong.
        """
        if len(buffer) != self.num_bytes(count):
            raise wire.WireError(
                f"received {len(buffer)} bytes of {count} encoded values, expected {self.num_bytes(count)}"
            )
        edge = self.head_bytes(count)
        return self.read(buffer[:edge], buffer[edge:], count, ops)

    def decode(self, buffer: Array, count: int, ops: Ops) -> Array:
        """Decode values [count] float32; see :meth:`coded`. Damaged bytes of the right length give finite values."""
        return ops.dense(self.coded(buffer, count, ops))


def reduced_num_bytes(count: int, codec: Codec, route: Route, world_size: int) -> int:
    """Return the payload bytes that a rank passes to its collectives to sum ``count`` values."""
    if route == "gather":
        return wire.NUM_BYTES + codec.num_bytes(count)
    return (world_size + 1) * codec.num_bytes(-(-count // world_size))


def scatter(
    x: Array, codec: Codec, ctx: Context, work: Workspace, stream: int = 0
) -> Generator[Any, Any, tuple[Coded, Coded | None]]:
    """Sum ``x`` over ranks by scatter-reduce.

    Args:
        x: float32 [n].
        codec: the number format.
        ctx: rank, world_size, step and tensor.
        work: buffers, scan results and counters of this exchange, and the array ops.
        stream: index of the sum within the exchange, so that each sum has its own random numbers.

    Yields:
        An all-to-all and an all-gather.

    Returns:
        The sum [n], and this rank's share of it [n] or None if ``ctx.needs_own`` is False. Neither is decoded yet.

    Raises:
        WireError: a received shard has a wrong number of bytes.
    """
    ops = work.ops
    n = len(x)
    shard = -(-n // ctx.world_size)
    bounds = [(min(n, r * shard), min(n, (r + 1) * shard)) for r in range(ctx.world_size)]
    start, stop = bounds[ctx.rank]
    width = codec.num_bytes(shard)
    first = stream * (ctx.world_size + 1)  # a sum needs world + 1 random streams: one per shard, and one for the sum

    def written(values: Array, number: int, out: Array) -> None:
        edge = codec.num_bytes(len(values))
        codec.encode(values, ctx, work, first + number, out[:edge])
        out[edge:] = 0

    def read(piece: Array, count: int) -> Any:
        # Shards have no header, and on networks that gather unequal lengths a peer may send any number of bytes
        if len(piece) != width:
            raise wire.WireError(f"received a shard of {len(piece)} bytes, expected {width}")
        return codec.coded(piece[: codec.num_bytes(count)], count, ops)

    payload = work.buffer(f"shards.{stream}", width * ctx.world_size, "uint8", x)
    mine = [payload[r * width : (r + 1) * width] for r in range(ctx.world_size)]
    for r, (a, b) in enumerate(bounds):
        written(x[a:b], r, mine[r])
    pieces = yield AllToAll(payload)
    summed = work.buffer(f"summed.{stream}", stop - start, "float32", x)
    ops.write(summed, Sum([read(piece, stop - start) for piece in pieces]), 1.0)
    summed = ops.scaled(summed, 1.0)  # clips Inf, whose error would be Inf, too, and stay in the residual
    again = work.buffer(f"again.{stream}", width, "uint8", x)
    written(summed, ctx.world_size, again)
    shards = yield AllGather(again, fixed_length=True)
    total = Joined([read(piece, b - a) for piece, (a, b) in zip(shards, bounds, strict=True)])
    if not ctx.needs_own:
        return total, None
    own = [read(codes, b - a) for codes, (a, b) in zip(mine, bounds, strict=True)]
    # The error of the second encoding belongs to this rank's share
    error = work.buffer(f"error.{stream}", stop - start, "float32", x)
    ops.write(error, total.parts[ctx.rank], 1.0)
    ops.subtract(error, summed, 1.0)
    own[ctx.rank] = Sum([own[ctx.rank], error])
    return total, Joined(own)


@dataclass(frozen=True, kw_only=True)
class Quantizer(Method):
    """Base class of methods that consist of a codec: they encode every value in fewer bits."""

    route: Route = "gather"
    """How codes are summed. "gather": all ranks receive the codes of all ranks. "scatter": shards are summed and
    encoded again, so the bytes received do not grow with the number of ranks, but there is a second rounding."""

    @property
    def codec(self) -> Codec:
        """The number format."""
        raise NotImplementedError

    @property
    def shard_codec(self) -> Codec | None:
        return self.codec

    def num_bytes(self, spec: TensorSpec, world_size: int) -> int:
        return reduced_num_bytes(spec.size, self.codec, self.route, world_size)

    def encode(self, x: Array, state: dict[str, Array], ctx: Context, work: Workspace) -> Array:
        header = self._header(ctx)
        payload = work.buffer("payload", header.length, "uint8", x)
        payload[: wire.NUM_BYTES] = work.ops.asarray(np.frombuffer(wire.pack(header), np.uint8), like=x)
        self.codec.encode(x, ctx, work, out=payload[wire.NUM_BYTES :])
        return payload

    def _header(self, ctx: Context) -> wire.Header:
        n = ctx.spec.size
        return wire.Header(self.id, 0, self.codec.code, n, n, wire.NUM_BYTES + self.codec.num_bytes(n))

    def coded(self, payload: Array, ctx: Context, ops: Ops) -> Array | Coded:
        """Check a payload like :meth:`decode`, but leave decoding to the function that writes the values."""
        wire.check(ops.head_bytes(payload, wire.NUM_BYTES), len(payload), self._header(ctx))
        return self.codec.coded(payload[wire.NUM_BYTES :], ctx.spec.size, ops)

    def decode(self, payload: Array, ctx: Context, work: Workspace) -> Array:
        return work.ops.dense(self.coded(payload, ctx, work.ops))

    def exchange(self, x: Array, state: dict[str, Array], ctx: Context, work: Workspace) -> Communication:
        if self.route == "scatter":
            return Reduced(*(yield from scatter(x, self.codec, ctx, work)))
        pieces = yield AllGather(self.encode(x, state, ctx, work), fixed_length=True)
        shares = [self.coded(piece, ctx, work.ops) for piece in pieces]
        return Reduced(total=Sum(shares), own=shares[ctx.rank])
