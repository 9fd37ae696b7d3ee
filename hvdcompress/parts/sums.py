"""How tensors are summed whose codes no network can add.

*gather*: every rank's codes go to all, and each decodes and adds all p of them: p − 1 payloads received.

*scatter*: a scatter-reduce. Rank r gets everybody's r-th shard, decodes and adds them, encodes the sum again,
and hands it to all: about two payloads sent and received, however many workers. The second encoding has
an error of its own, which rank r takes over in its own share, so that shares still add up to the sum.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from hvdcompress.method import AllGather, AllToAll, Array, Communication, Context, Method, Reduced, Route, TensorSpec
from hvdcompress.parts import wire


class Codec(Protocol):
    """Writes [count] float32 into a number of bytes that depends on ``count`` alone, and reads them again."""

    code: int  #: the wire header's value coding

    def num_bytes(self, count: int) -> int:
        """Bytes of ``count`` values."""

    def encode(self, x: Array, ctx: Context, ops: Any, stream: int = 0) -> Array:
        """[count] float32 -> [num_bytes] uint8. ``stream`` tells apart the random numbers of one exchange."""

    def decode(self, buffer: Array, count: int, ops: Any) -> Array:
        """[num_bytes] uint8 -> [count] float32. Raises ``WireError`` on bytes that cannot be."""


def reduced_num_bytes(count: int, codec: Codec, route: Route, world: int) -> int:
    """Payload bytes that a rank hands to its collectives for ``count`` values."""
    if route == "gather":
        return wire.NUM_BYTES + codec.num_bytes(count)
    return (world + 1) * codec.num_bytes(-(-count // world))


def scatter(x: Array, codec: Codec, ctx: Context, ops: Any, stream: int = 0) -> Generator[Any, Any, tuple[Array, Any]]:
    """The sum of ``x`` [n] over ranks by scatter-reduce, and this rank's share of it, or None if nobody asks for it."""
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
    """A method that is a codec: each value of x is written shorter, and none is left out."""

    route: Route = "gather"
    """"gather": everybody's codes to all; "scatter": shards are summed and encoded again, so that the bytes do
    not grow with the workers, at the price of a second rounding."""

    @property
    def codec(self) -> Codec:
        """What each value is written with."""
        raise NotImplementedError

    def num_bytes(self, spec: TensorSpec, world: int) -> int:
        return reduced_num_bytes(spec.size, self.codec, self.route, world)

    def encode(self, x: Array, state: dict[str, Array], ctx: Context, ops: Any) -> Array:
        header = np.frombuffer(wire.pack(self._header(len(x))), np.uint8)
        return ops.concat([ops.asarray(header, like=x), self.codec.encode(x, ctx, ops)])

    def decode(self, payload: Array, ctx: Context, ops: Any) -> Array:
        n = ctx.spec.size
        wire.check(ops.head_bytes(payload, wire.NUM_BYTES), len(payload), self._header(n))
        return self.codec.decode(payload[wire.NUM_BYTES :], n, ops)

    def _header(self, n: int) -> wire.Header:
        return wire.Header(self.id, 0, self.codec.code, n, n, wire.NUM_BYTES + self.codec.num_bytes(n))

    def exchange(self, x: Array, state: dict[str, Array], ctx: Context, ops: Any) -> Communication:
        if self.route == "gather":
            return (yield from super().exchange(x, state, ctx, ops))
        total, own = yield from scatter(x, self.codec, ctx, ops)
        return Reduced(total=total, own=own)
