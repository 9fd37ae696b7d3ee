"""From a plan to what the time line needs: its units, with their collectives and the seconds of their codecs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache

from experiments.advise.timeline import Call, Unit
from experiments.scale import cost
from experiments.scale.cost import Codec
from experiments.scale.imagined import Asked
from hvdcompress.method import Method, TensorSpec
from hvdcompress.plan import BY_NAME, Bucket, Grouping, Plan

__all__ = ["Codecs", "buckets_of", "call_of", "status", "unit_of", "units_of"]

#: gives a method's codec: before its last collective, and after it
Codecs = Callable[[Method], tuple[Codec, Codec]]


def call_of(each: Iterable[Asked], world_size: int) -> Call:
    """A collective of which the ranks that were watched ask for ``each``."""
    asked = list(each)
    return Call(cost.kind(asked), max(one.num_bytes for one in asked), cost.line(asked, world_size))


def status(plan: Plan, world_size: int) -> list[Call]:
    """What the PyTorch driver asks for once per step: nothing where every tensor is left to Horovod."""
    return [] if plan.stateless and plan.program.main.identity else [call_of([cost.STATUS], world_size)]


def buckets_of(plan: Plan, tensors: Mapping[str, tuple[int, ...]], grouping: Grouping = BY_NAME) -> list[Bucket]:
    """What travels together."""
    return plan.buckets((TensorSpec(name, shape) for name, shape in tensors.items()), grouping)


@cache
def _placeholder(world_size: int) -> Call:
    return call_of([cost.PLACEHOLDER], world_size)


def unit_of(bucket: Bucket, world_size: int, codecs: Codecs, shared: float = 1.0) -> Unit:
    """A bucket as a unit of the time line.

    Args:
        bucket: what is exchanged together.
        world_size: the number of ranks.
        codecs: gives a method's codec.
        shared: ranks that share a processor.
    """
    exchange = cost.exchange_of(bucket, world_size)
    encode = decode = 0.0
    before, after = codecs(exchange.method)
    for size, asked in exchange.parts:
        pieces, num_bytes = cost.gathered(asked, world_size)
        encode += before.seconds(size, pieces, num_bytes)
        decode += after.seconds(size, pieces, num_bytes)
    return Unit(
        bucket.spec.name,
        tuple(member.name for member in bucket.members),
        tuple(call_of(each, world_size) for each in exchange.rounds),
        shared * encode,
        shared * decode,
        (_placeholder(world_size),) * (exchange.placeholders - exchange.rides),
    )


def units_of(
    plan: Plan, tensors: Mapping[str, tuple[int, ...]], world_size: int, codecs: Codecs, shared: float = 1.0
) -> list[Unit]:
    """The units of a plan, in its last stage and phase."""
    return [unit_of(bucket, world_size, codecs, shared) for bucket in buckets_of(plan, tensors)]
