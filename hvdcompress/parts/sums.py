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
    add_shares,
)
from hvdcompress.ops.spec import Ops
from hvdcompress.parts import wire


class Codec(Protocol):
    """Writes float32 [count] in a number of bytes that depends only on ``count``, and reads them."""

    code: int  #: value coding in the wire header, 0 to 15

    def num_bytes(self, count: int) -> int:
        """Return the bytes of ``count`` values."""

    def encode(self, x: Array, ctx: Context, ops: Ops, stream: int = 0) -> Array:
        """Write values.

        Args:
            x: float32 [count].
            ctx: rank, step, tensor and seed, for random streams and counters.
            ops: the array backend.
            stream: a number that differs between the calls of one exchange, so that their random numbers differ.

        Returns:
            uint8 [num_bytes(count)].
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


def reduced_num_bytes(count: int, codec: Codec, route: Route, world: int) -> int:
    """Return the payload bytes that a rank hands to its collectives to sum ``count`` values."""
    if route == "gather":
        return wire.NUM_BYTES + codec.num_bytes(count)
    return (world + 1) * codec.num_bytes(-(-count // world))


def scatter(x: Array, codec: Codec, ctx: Context, ops: Ops, stream: int = 0) -> Generator[Any, Any, tuple[Array, Any]]:
    """Sum ``x`` over ranks by scatter-reduce.

    Args:
        x: float32 [n].
        codec: the number format.
        ctx: rank, world, step and tensor.
        ops: the array backend.
        stream: a number that differs between the sums of one exchange, so that their random numbers differ.

    Yields:
        An all-to-all and an all-gather.

    Returns:
        The sum [n], and this rank's share of it [n] or None if ``ctx.needs_own`` is False.
    """
    n, shard = len(x), -(-len(x) // ctx.world)
    bounds = [(min(n, r * shard), min(n, (r + 1) * shard)) for r in range(ctx.world)]
    start, stop = bounds[ctx.rank]
    width, first = codec.num_bytes(shard), stream * (ctx.world + 1)

    def filled(codes: Array) -> Array:
        missing = width - len(codes)
        return ops.concat([codes, ops.zeros(missing, "uint8", like=codes)]) if missing else codes

    def read(piece: Array, count: int) -> Array:
        return codec.decode(piece[: codec.num_bytes(count)], count, ops)

    mine = [codec.encode(x[a:b], ctx, ops, stream=first + r) for r, (a, b) in enumerate(bounds)]
    pieces = yield AllToAll(ops.concat([filled(codes) for codes in mine]))
    summed = ops.add_all([read(piece, stop - start) for piece in pieces])
    again = codec.encode(summed, ctx, ops, stream=first + ctx.world)
    shards = yield AllGather(filled(again))
    total = ops.concat([read(piece, b - a) for piece, (a, b) in zip(shards, bounds, strict=True)])
    if not ctx.needs_own:
        return total, None
    own = ops.concat([codec.decode(codes, b - a, ops) for codes, (a, b) in zip(mine, bounds, strict=True)])
    error = total[start:stop] - summed
    return total, ops.concat([own[:start], own[start:stop] + error, own[stop:]])


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

    def encode(self, x: Array, state: dict[str, Array], ctx: Context, ops: Ops) -> Array:
        header = np.frombuffer(wire.pack(self._header(len(x))), np.uint8)
        return ops.concat([ops.asarray(header, like=x), self.codec.encode(x, ctx, ops)])

    def decode(self, payload: Array, ctx: Context, ops: Ops) -> Array:
        n = ctx.spec.size
        return self.codec.decode(self.codes(payload, n, ops), n, ops)

    def codes(self, payload: Array, n: int, ops: Ops) -> Array:
        """Check a payload's header and return what follows it: the codes of n values."""
        wire.check(ops.head_bytes(payload, wire.NUM_BYTES), len(payload), self._header(n))
        return payload[wire.NUM_BYTES :]

    def _header(self, n: int) -> wire.Header:
        return wire.Header(self.id, 0, self.codec.code, n, n, wire.NUM_BYTES + self.codec.num_bytes(n))

    def exchange(self, x: Array, state: dict[str, Array], ctx: Context, ops: Ops) -> Communication:
        if self.route == "gather":
            pieces = yield AllGather(self.encode(x, state, ctx, ops))
            return self.summed(pieces, x, ctx, ops)
        total, own = yield from scatter(x, self.codec, ctx, ops)
        return Reduced(total=total, own=own)

    def summed(self, pieces: list[Array], x: Array, ctx: Context, ops: Ops) -> Reduced:
        """Decode all ranks' payloads and add them in the order of ranks; ``x``: what this rank encoded."""
        shares = [self.decode(piece, ctx, ops) for piece in pieces]
        return Reduced(total=add_shares(shares, ops), own=shares[ctx.rank])
