"""The values of a payload: how they are written (fp32, fp16, bf16), and how they are summed.

``encode``/``decode`` write values into gathered payloads. ``all_reduce`` sums values over ranks in the
chosen width. fp16 is divided by the number of workers first, so that a sum of fp16 stays in range for any
world. bf16 cannot be summed by Horovod 0.28.1 or MPI, so it goes by scatter-reduce: each rank sums one
shard in float32 and hands the rounded sum to all.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from hvdcompress.method import AllGather, AllReduce, AllToAll, Array, Turn, Values

WIDTH: dict[str, int] = {"fp32": 4, "fp16": 2, "bf16": 2}  #: bytes a value
SUMMED_MAX = 65504.0 * (1 - 2**-9)  #: largest |x| in an fp16 sum: room for the sum's own rounding
CODE: dict[str, int] = {"fp32": 0, "fp16": 1, "bf16": 2}  #: the wire header's value coding


def _count_saturated(me: Turn, count: Any) -> None:
    me.counters["saturated"] = me.counters.get("saturated", 0) + count


def encode(x: Array, values: Values, me: Turn, ops: Any) -> Array:
    """[k] float32 -> uint8. A value beyond fp16's range saturates and is counted."""
    if values == "fp16":
        x, saturated = ops.to_fp16(x, 1.0)
        _count_saturated(me, saturated)
    elif values == "bf16":
        x = ops.to_bf16(x)
    return ops.to_bytes(x)


def decode(buffer: Array, values: Values, ops: Any) -> Array:
    """uint8 -> [k] float32."""
    if values == "fp16":
        return ops.from_fp16(ops.from_bytes(buffer, "float16"), 1.0)
    if values == "bf16":
        return ops.from_bf16(ops.from_bytes(buffer, "uint16"))
    return ops.from_bytes(buffer, "float32")


def reduced_num_bytes(count: int, values: Values, world: int) -> int:
    """What :func:`all_reduce` of ``count`` values hands to its collectives."""
    if values != "bf16":
        return count * WIDTH[values]
    shard = -(-count // world)
    return 2 * shard * world + 2 * shard


def all_reduce(x: Array, values: Values, me: Turn, ops: Any) -> Generator[Any, Any, tuple[Array, Array]]:
    """The sum of ``x`` over ranks, and this rank's share of it after rounding: both like ``x``."""
    if values == "fp16":
        payload, saturated = ops.to_fp16(x, 1.0 / me.world, SUMMED_MAX / me.world)
        _count_saturated(me, saturated)
        total = yield AllReduce(payload)
        return ops.from_fp16(total, me.world), ops.from_fp16(payload, me.world)
    if values == "bf16":
        return (yield from _scatter_reduce_bf16(x, me, ops))
    return (yield AllReduce(x)), x


def _scatter_reduce_bf16(x: Array, me: Turn, ops: Any) -> Generator[Any, Any, tuple[Array, Array]]:
    count = len(x)
    bits = ops.to_bf16(x)  # [n] uint16
    own = ops.from_bf16(bits)
    missing = -count % me.world
    if missing:
        bits = ops.concat([bits, ops.zeros(missing, "uint16", like=bits)])
    shards = yield AllToAll(ops.to_bytes(bits))
    summed = ops.add_all([ops.from_bf16(ops.from_bytes(shard, "uint16")) for shard in shards])
    pieces = yield AllGather(ops.to_bytes(ops.to_bf16(summed)))
    total = ops.concat([ops.from_bf16(ops.from_bytes(piece, "uint16")) for piece in pieces])
    return total[:count], own
