"""Summing tensors whose codes no network can add.

*gather*: every rank receives the codes of all p ranks, decodes and adds them. It receives p − 1 payloads.

*scatter*: a scatter-reduce. Rank r receives shard r of every rank, decodes and adds the shards, encodes the sum and
sends it to all. About two payloads are sent and received, for any number of ranks. The second encoding has an error of
its own; rank r counts it in its own share, so that the shares still add up to the sum.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Protocol

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


class Codec(Protocol):
    """Writes float32 [count] in a number of bytes that depends only on ``count``, and reads them."""

    @property
    def code(self) -> int:
        """The value coding in the wire header, 0 to 15."""

    def num_bytes(self, count: int) -> int:
        """Return the bytes of ``count`` values."""

    def encode(self, x: Array, ctx: Context, work: Workspace, stream: int = 0, out: Array | None = None) -> Array:
        """Write values.

        Args:
            x: float32 [count].
            ctx: rank, step, tensor and seed, for random streams.
            work: the counters and the array ops.
            stream: a number that differs between the calls of one exchange, so that their random numbers differ.
            out: uint8 [num_bytes(count)] that receives them; by default a new array.

        Returns:
            uint8 [num_bytes(count)].
        """

    def coded(self, buffer: Array, count: int, ops: Ops) -> Array | Coded:
        """Check values as :meth:`decode` does, and leave them to be decoded where they are written.

        Args:
            buffer: uint8 [num_bytes(count)]; read when the values are written.
            count: number of values.
            ops: the array backend.

        Returns:
            The values [count]; decoded, if the array ops do not know the format.

        Raises:
            WireError: the bytes are not such values.
        """

    def decode(self, buffer: Array, count: int, ops: Ops) -> Array:
        """Read values.

        Args:
            buffer: uint8 [num_bytes(count)].
            count: number of values.
            ops: the array backend.

        Returns:
            float32 [count].

        Raises:
            WireError: the bytes are not such values.
        """


def put(parts: list[Array], out: Array | None, ops: Ops) -> Array:
    """Write the parts of a payload one after another to ``out``; without it, to a new array, which is returned."""
    if out is None:
        return ops.concat(parts)
    start = 0
    for part in parts:
        out[start : start + len(part)] = part
        start += len(part)
    if start != len(out):
        raise ValueError(f"{start} bytes were written to a payload of {len(out)}")
    return out


def reduced_num_bytes(count: int, codec: Codec, route: Route, world: int) -> int:
    """Return the payload bytes that a rank hands to its collectives to sum ``count`` values."""
    if route == "gather":
        return wire.NUM_BYTES + codec.num_bytes(count)
    return (world + 1) * codec.num_bytes(-(-count // world))


def scatter(
    x: Array, codec: Codec, ctx: Context, work: Workspace, stream: int = 0
) -> Generator[Any, Any, tuple[Joined, Any]]:
    """Sum ``x`` over ranks by scatter-reduce.

    Args:
        x: float32 [n].
        codec: the number format.
        ctx: rank, world, step and tensor.
        work: memory, findings and counters of this exchange, and the array ops.
        stream: a number that differs between the sums of one exchange, so that their random numbers differ.

    Yields:
        An all-to-all and an all-gather.

    Returns:
        The sum [n], and this rank's share of it [n] or None if ``ctx.needs_own`` is False; neither is decoded yet.

    Raises:
        WireError: a shard that came has not the bytes of one.
    """
    ops = work.ops
    n, shard = len(x), -(-len(x) // ctx.world)
    bounds = [(min(n, r * shard), min(n, (r + 1) * shard)) for r in range(ctx.world)]
    start, stop = bounds[ctx.rank]
    width, first = codec.num_bytes(shard), stream * (ctx.world + 1)

    def written(values: Array, number: int, out: Array) -> None:
        edge = codec.num_bytes(len(values))
        codec.encode(values, ctx, work, first + number, out[:edge])
        if edge < width:
            ops.fill(out[edge:], 0)

    def read(piece: Array, count: int) -> Any:
        if len(piece) != width:  # they have no header; networks that gather unequal lengths bring what peers sent
            raise wire.WireError(f"received a shard of {len(piece)} bytes, expected {width}")
        return codec.coded(piece[: codec.num_bytes(count)], count, ops)

    payload = work.buffer(f"shards.{stream}", width * ctx.world, "uint8", x)
    mine = [payload[r * width : (r + 1) * width] for r in range(ctx.world)]
    for r, (a, b) in enumerate(bounds):
        written(x[a:b], r, mine[r])
    pieces = yield AllToAll(payload)
    summed = work.buffer(f"summed.{stream}", stop - start, "float32", x)
    ops.write(summed, Sum([read(piece, stop - start) for piece in pieces]), 1.0)
    again = work.buffer(f"again.{stream}", width, "uint8", x)
    written(summed, ctx.world, again)
    shards = yield AllGather(again, fixed_length=True)
    total = Joined([read(piece, b - a) for piece, (a, b) in zip(shards, bounds, strict=True)])
    if not ctx.needs_own:
        return total, None
    own = [read(codes, b - a) for codes, (a, b) in zip(mine, bounds, strict=True)]
    error = work.buffer(f"error.{stream}", stop - start, "float32", x)  # of the second encoding
    ops.write(error, total.parts[ctx.rank], 1.0)
    ops.subtract(error, summed, 1.0)
    own[ctx.rank] = Sum([own[ctx.rank], error])
    return total, Joined(own)


@dataclass(frozen=True, kw_only=True)
class Quantizer(Method):
    """Base of the methods that are a codec: they write every value in fewer bits, and leave none out."""

    route: Route = "gather"
    """How codes are summed. "gather": all ranks receive all ranks' codes. "scatter": shards are summed and quantized
    again, so that the bytes received do not grow with the number of ranks, at the price of a second rounding."""

    @property
    def codec(self) -> Codec:
        """The codec of the values."""
        raise NotImplementedError

    def num_bytes(self, spec: TensorSpec, world: int) -> int:
        return reduced_num_bytes(spec.size, self.codec, self.route, world)

    def encode(self, x: Array, state: dict[str, Array], ctx: Context, work: Workspace) -> Array:
        payload = self.payload(ctx, work, like=x)
        self.codec.encode(x, ctx, work, out=payload[wire.NUM_BYTES :])
        return payload

    def payload(self, ctx: Context, work: Workspace, like: Array) -> Array:
        """Return the tensor's payload, the same in every step, with its header; the codes are to be written."""
        header = self._header(ctx.spec.size)
        payload = work.buffer("payload", header.length, "uint8", like)
        payload[: wire.NUM_BYTES] = work.ops.asarray(np.frombuffer(wire.pack(header), np.uint8), like)
        return payload

    def decode(self, payload: Array, ctx: Context, work: Workspace) -> Array:
        ops, n = work.ops, ctx.spec.size
        return self.codec.decode(self.codes(payload, n, ops), n, ops)

    def codes(self, payload: Array, n: int, ops: Ops) -> Array:
        """Check a payload's header and return what follows it: the codes of n values."""
        wire.check(ops.head_bytes(payload, wire.NUM_BYTES), len(payload), self._header(n))
        return payload[wire.NUM_BYTES :]

    def _header(self, n: int) -> wire.Header:
        return wire.Header(self.id, 0, self.codec.code, n, n, wire.NUM_BYTES + self.codec.num_bytes(n))

    def exchange(self, x: Array, state: dict[str, Array], ctx: Context, work: Workspace) -> Communication:
        if self.route == "gather":
            pieces = yield AllGather(self.encode(x, state, ctx, work), fixed_length=True)
            return self.summed(pieces, x, ctx, work)
        total, own = yield from scatter(x, self.codec, ctx, work)
        return Reduced(total=total, own=own)

    def summed(self, pieces: list[Array], x: Array, ctx: Context, work: Workspace) -> Reduced:
        """Decode all ranks' payloads and add them in the order of ranks; ``x``: what this rank encoded."""
        ops, n = work.ops, len(x)
        shares = [self.codec.coded(self.codes(piece, n, ops), n, ops) for piece in pieces]
        return Reduced(total=Sum(shares), own=shares[ctx.rank])
