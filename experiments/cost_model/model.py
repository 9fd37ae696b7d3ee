"""The cost model: seconds of an exchange among any number of ranks p, over links of any rate.

An exchange is described by its :class:`Work`, which comes from the methods themselves (:func:`work`). It costs::

    seconds = message · messages that wait for each other      α of Hockney 1994
            + link    · 8 · line / rate                        β; 1 is a link without headers
            + byte    · shared · line                          what the CPU spends on each byte, whatever the link
            + call    · shared · collectives                   of each collective, before fusion
            + round   · rounds                                 one waits for another: under Horovod, its negotiation
            + codec   · shared · codec seconds                 γ; timed in one process

Collectives run as rings (Patarasuk and Yuan 2009; Thakur, Rabenseifner and Gropp 2005, §4), dense ones too:

    ===========  ==========================  ==============================================
    collective   messages after each other   bytes that a rank transmits for m bytes
    ===========  ==========================  ==============================================
    all-reduce   2(p − 1)                    2(p − 1)/p · m
    all-gather   p − 1                       (p − 1) · m
    all-to-all   p − 1, or its partners      (p − 1)/p · m, or m without the rank's own piece
    broadcast    as an all-reduce            as an all-reduce: it is sent as a sum with zeros
    ===========  ==========================  ==============================================

Where ``shared`` ranks share a core, the CPU's work takes so many times as long. Left out: overlap (γ below 1 is a sign
of it), trees for small collectives, contention between links, slow ranks. Each driver has constants of its own.

On H hosts with L consecutive ranks each, p = H·L. The ranks of a host share its link, and have one of the rate
``inside`` to each other, which includes what the CPU spends on its bytes::

    one level     8 · bytes on the host's link / rate, or 8 · line / inside if that is longer:
                  of a ring, the bytes of one rank, because it enters and leaves each host once;
                  of an all-to-all, L · (p − L)/p · m, from each of the L ranks to those of other hosts
                  of the p − 1 messages around a ring, H − 1 are between hosts and p − H inside
    two levels    8 · 2(L − 1)/L · n / inside: n bytes of gradients to their owners, and as many back
                  + the above with H for p: of the busiest owner, and on the host's link of all L together
                  + 2 collectives of each bucket with L − 1 messages inside; 2 rounds

Messages inside take :data:`INSIDE_LATENCY`. In both, statuses and placeholders are exchanged among all p ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil, prod
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd

from experiments.cost_model.imagined import Request, Rounds, requests
from hvdcompress.engine.agreement import Status
from hvdcompress.engine.nodes import Nodes, Placement
from hvdcompress.method import Method, TensorSpec
from hvdcompress.plan import BY_NAME, IN_ORDER, Bucket, Plan

Begun = list[tuple[int, Sequence[Request]]]  #: collectives: when each begins, and how ranks request it
Driver = Literal["horovod", "mpi4py"]  #: whose exchange it is: PyTorch's under Horovod, or MPI's
GROUPINGS = {"horovod": BY_NAME, "mpi4py": IN_ORDER}  #: which tensors travel together
STATUSES = {"horovod": 1, "mpi4py": 2}  #: before waiting; or before the first collective and after the last
FUSED = 128 * 2**20  # bytes: Horovod sends tensors that come together in one collective of up to so many
INSIDE_LATENCY = 2e-6  #: seconds of a message between ranks of a host
CONSTANTS = ("message", "link", "byte", "call", "round", "codec")  #: the factors of the model; all but two in seconds


class Work(NamedTuple):
    """The work of one exchange, on the rank that has most of it.

    Attributes:
        world_size: the number of ranks.
        sent: bytes passed to collectives.
        on_wire: bytes transmitted.
        line: bytes that pass one after the other: a rank that only receives in a round keeps the others waiting.
        calls: collectives, before fusion.
        rounds: how many collectives must follow each other.
        messages: how many of their messages between hosts must.
        codec: seconds of the codec.
        on_host: bytes that pass the link of a host, in the direction that has more.
        hops: how many messages inside a host must follow each other.
        inside: with two levels, bytes transmitted to other ranks of the host.
    """

    world_size: int
    sent: float
    on_wire: float
    line: float
    calls: int
    rounds: int
    messages: int
    codec: float = 0.0
    on_host: float = 0.0
    hops: int = 0
    inside: float = 0.0


class Codec(NamedTuple):
    """Seconds of one rank's codec: per tensor, element, gathered payload and byte of gathered payloads."""

    tensor: float = 0.0
    element: float = 0.0
    piece: float = 0.0
    byte: float = 0.0

    @staticmethod
    def features(elements: int, rounds: Rounds) -> tuple[float, ...]:
        """Return what these seconds are multiplied with, for a tensor of so many elements on rank 0."""
        mine = [request for request, *_ in rounds]
        return (1, elements, sum(one.pieces for one in mine), sum(one.gathered for one in mine))


def work(
    plan: Plan,
    tensors: Mapping[str, tuple[int, ...]],
    world_size: int,
    codec: Callable[[Method], Codec] | None = None,
    driver: Driver = "horovod",
    local_size: int = 1,
) -> Work:
    """Return the work of an exchange under a plan, in its last period and phase.

    Args:
        plan: the methods.
        tensors: shapes by name.
        world_size: the number of ranks.
        codec: gives a method's codec; without it, the codec's seconds are 0.
        driver: whose exchange. Each adds a status or two and, under Horovod, a placeholder for each tensor.
        local_size: the number of ranks of a host.
    """
    buckets = plan.buckets((TensorSpec(*each) for each in tensors.items()), GROUPINGS[driver])
    found, begun = _exchanges(buckets, world_size, codec)
    alone = [bucket for bucket in buckets if driver == "horovod" and len(bucket.members) == 1]
    methods = [bucket.program.main for bucket in alone]
    stock = [method for method in methods if method.identity and method.feedback == "none"]  # gradients as they are
    both = work_of([*_own_collectives(driver, len(tensors) - len(stock), world_size), *begun], world_size, local_size)
    return both._replace(rounds=found.rounds + STATUSES[driver], codec=found.codec)


def two_levels(
    plan: Plan,
    tensors: Mapping[str, tuple[int, ...]],
    nodes: Nodes,
    codec: Callable[[Method], Codec] | None = None,
    driver: Driver = "horovod",
) -> Work:
    """Return the work of an exchange with two levels; arguments as in :func:`work`, with the hosts as ``nodes``."""
    p, local_size = nodes.num_nodes * nodes.local_size, nodes.local_size
    specs = [TensorSpec(*each) for each in tensors.items()]
    placement, buckets = Placement(nodes, 0).group(plan, specs, GROUPINGS[driver], {})
    owned = [[bucket for bucket in buckets if placement.owner(bucket) == rank] for rank in range(local_size)]
    owners = pd.DataFrame([_exchanges(each, nodes.num_nodes, codec)[0] for each in owned])
    sizes = np.array([4 * sum(bucket.spec.size for bucket in each) for each in owned])
    # To the owners, each rank sends what it does not own; back, a ring carries all but what its successor owns
    inside = float(max(2 * sizes.sum() - sizes - np.roll(sizes, -1)))
    common = work_of(_own_collectives(driver, len(tensors), p), p, local_size)
    busiest = Work(*(owners.max() + np.array(common)))
    return busiest._replace(
        world_size=p,
        calls=busiest.calls + 2 * len(buckets),
        rounds=STATUSES[driver] + owners["rounds"].max() + 2,
        on_host=common.on_host + owners["on_host"].sum(),
        hops=common.hops + 2 * (local_size - 1) * len(buckets),
        inside=inside,
    )


def _own_collectives(driver: Driver, placeholders: int, world_size: int) -> Begun:
    """Return a driver's own collectives of a step: statuses, and under Horovod so many placeholders."""
    status = Request.of("AllReduce", "float64", 8 * len(Status._fields), world_size)
    # A probe of 8 bytes, by which the PyTorch driver tells Average from Sum
    placeholder = Request.of("AllReduce", "float32", 8, world_size)
    statuses = [(-1 - number, [status]) for number in range(STATUSES[driver])]
    return [*statuses, *([(0, [placeholder])] * (placeholders if driver == "horovod" else 0))]


def _exchanges(
    buckets: Sequence[Bucket], world_size: int, codec: Callable[[Method], Codec] | None
) -> tuple[Work, Begun]:
    """Return the work of the exchanges of buckets alone, and their collectives."""
    begun: Begun = []
    seconds, most = 0.0, 0
    for bucket in buckets:
        method = bucket.program.main
        specs = bucket.members if bucket.runs_per_tensor(method) else [bucket.spec]
        parts = [requests(method, world_size, spec) for spec in specs]
        together = [[_joined(each) for each in zip(*tensors, strict=True)] for tensors in zip(*parts, strict=True)]
        begun += enumerate(together)
        most = max(most, len(together))
        if codec:
            each = [Codec.features(spec.size, rounds) for spec, rounds in zip(specs, parts, strict=True)]
            seconds += float(np.sum(np.array(each) @ np.array(codec(method))))
    return work_of(begun, world_size)._replace(rounds=most, codec=seconds), begun


def _joined(together: Sequence[Request]) -> Request:
    """Return the request of tensors that travel together."""
    first = together[0]
    sums = {name: sum(getattr(one, name) for one in together) for name in ("num_bytes", "on_wire", "line", "gathered")}
    return first._replace(**sums, pieces=max(one.pieces for one in together))


def work_of(begun: Begun, world_size: int, local_size: int = 1) -> Work:
    """Return the work of collectives, all of which follow from one round.

    Args:
        begun: the collectives: when each begins, and how ranks 0 and 1 (if they differ) request it. What begins at the
            same time and is of one kind travels as one, but for all-to-alls.
        world_size: the number of ranks.
        local_size: the number of ranks of a host.
    """
    both = [[each[min(rank, len(each) - 1)] for _, each in begun] for rank in (0, 1)]
    num_hosts = world_size // local_size
    fused: dict[tuple[int, str, str], list[int]] = {}
    messages = hops = 0
    on_host = 0.0
    for at, each in begun:
        first = each[0]
        longest = max(one.line for one in each)
        if first.collective == "AllToAll":  # with each partner
            partners = min(max(1, *(one.pieces for one in each)), world_size - 1)
            is_outside = max(one.farthest for one in each) >= local_size
            outside = min(partners, world_size - local_size) if is_outside else 0
            messages += outside
            hops += partners - outside
            senders = local_size if first.pieces == world_size else 1  # gTop-k: only the first rank of a host
            on_host += senders * outside / max(1, partners) * longest
        else:
            fused.setdefault((at, first.collective, first.dtype), []).append(max(one.num_bytes for one in each))
            on_host += longest if num_hosts > 1 else 0
    rings = sum(turns(collective, lengths, world_size) for (_, collective, _), lengths in fused.items())
    return Work(
        world_size,
        max(sum(one.num_bytes for one in rank) for rank in both),
        max(sum(one.on_wire for one in rank) for rank in both),
        sum(max(one.line for one in each) for _, each in begun),
        len(begun),
        1,
        messages + rings * (num_hosts - 1),
        on_host=on_host,
        hops=hops + rings * (world_size - num_hosts),
    )


def turns(collective: str, lengths: Sequence[int], world_size: int) -> int:
    """Return how often all-reduces or all-gathers of these bytes, which begin together, pass around the ring."""
    times = world_size if collective == "AllGather" else 1
    return min(len(lengths), max(1, ceil(times * sum(lengths) / FUSED))) * (1 if collective == "AllGather" else 2)


def stock(tensors: Mapping[str, tuple[int, ...]], world_size: int, local_size: int = 1) -> Work:
    """Return the work of stock Horovod, dense in float32."""
    dense = [Request.of("AllReduce", "float32", 4 * prod(shape), world_size) for shape in tensors.values()]
    return work_of([(0, [one]) for one in dense], world_size, local_size)


def costs(constants: Mapping[str, float], points: pd.DataFrame) -> pd.DataFrame:
    """Return the seconds of exchanges by what they are spent on; the sum of a row is the exchange's.

    Args:
        constants: by the names in :data:`CONSTANTS`.
        points: columns of :class:`Work`, ``rate`` (bits per second) and ``shared`` (ranks that share a core).
    """
    return features(points) * pd.Series(constants)[list(CONSTANTS)]


def features(points: pd.DataFrame) -> pd.DataFrame:
    """Return what the constants are multiplied with; arguments as in :func:`costs`."""
    return pd.DataFrame(
        {
            "message": points["messages"],
            "link": 8 * points.get("on_host", points["line"]) / points["rate"],
            "byte": points["shared"] * points["line"],
            "call": points["shared"] * points["calls"],
            "round": points["rounds"],
            "codec": points["shared"] * points["codec"],
        }
    )
