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
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import ceil, prod
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd

from experiments.cost_model.imagined import Request, Rounds, piggyback, requests
from hvdcompress.engine.agreement import Status
from hvdcompress.method import Method, TensorSpec
from hvdcompress.plan import BY_NAME, IN_ORDER, Plan

Driver = Literal["horovod", "mpi4py"]  #: whose exchange it is: PyTorch's under Horovod, or MPI's
GROUPINGS = {"horovod": BY_NAME, "mpi4py": IN_ORDER}  #: which tensors travel together
STATUSES = {"horovod": 1, "mpi4py": 2}  #: before waiting; or before the first collective and after the last
FUSED = 128 * 2**20  # bytes: Horovod sends tensors that come together in one collective of up to so many
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
        messages: how many of their messages must.
        codec: seconds of the codec.
    """

    world_size: int
    sent: float
    on_wire: float
    line: float
    calls: int
    rounds: int
    messages: int
    codec: float = 0.0


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
) -> Work:
    """Return the work of an exchange under a plan, in its last stage and phase.

    Args:
        plan: the methods.
        tensors: shapes by name.
        world_size: the number of ranks.
        codec: gives a method's codec; without it, the codec's seconds are 0.
        driver: whose exchange. Each adds a status or two and, under Horovod, a placeholder for each tensor.
    """
    status = Request.of("AllReduce", "float64", 8 * len(Status().numbers()), world_size)
    # A probe of 8 bytes, by which the PyTorch driver tells Average from Sum
    placeholder = Request.of("AllReduce", "float32", 8, world_size)
    begun: list[tuple[int, Sequence[Request]]] = [(-1 - number, [status]) for number in range(STATUSES[driver])]
    seconds, most, riding = 0.0, 0, 0
    for bucket in plan.buckets((TensorSpec(*each) for each in tensors.items()), GROUPINGS[driver]):
        method, members = bucket.program.main, bucket.members
        specs = members if bucket.runs_per_tensor(method) else [bucket.spec]
        parts = [requests(method, world_size, spec) for spec in specs]
        together = [[_joined(each) for each in zip(*tensors, strict=True)] for tensors in zip(*parts, strict=True)]
        begun += enumerate(together)
        most = max(most, len(together))
        if codec:
            each = [Codec.features(spec.size, rounds) for spec, rounds in zip(specs, parts, strict=True)]
            seconds += float(np.sum(np.array(each) @ np.array(codec(method))))
        if driver == "horovod":
            rides = len(members) == 1 and piggyback(method, bucket.spec)
            if not (
                rides and method.identity and method.feedback == "none"
            ):  # else Horovod reduces the gradient itself
                begun += [(0, [placeholder])] * len(members)
                riding += rides
    found = work_of(begun, world_size)
    return found._replace(calls=found.calls - riding, rounds=most + STATUSES[driver], codec=seconds)


def _joined(together: Sequence[Request]) -> Request:
    """Return the request of tensors that travel together."""
    first = together[0]
    sums = {name: sum(getattr(one, name) for one in together) for name in ("num_bytes", "on_wire", "line", "gathered")}
    return first._replace(**sums, pieces=max(one.pieces for one in together))


def work_of(begun: Iterable[tuple[int, Sequence[Request]]], world_size: int) -> Work:
    """Return the work of collectives, all of which follow from one round.

    Args:
        begun: the collectives: when each begins, and how ranks 0 and 1 (if they differ) request it. What begins at the
            same time and is of one kind travels as one, but for all-to-alls.
        world_size: the number of ranks.
    """
    begun = list(begun)
    both = [[each[min(rank, len(each) - 1)] for _, each in begun] for rank in (0, 1)]
    fused: dict[tuple[int, str, str], list[int]] = {}
    passed = 0
    for at, each in begun:
        first = each[0]
        if first.collective == "AllToAll":  # with each partner
            passed += min(max(1, *(one.pieces for one in each)), world_size - 1)
        else:
            fused.setdefault((at, first.collective, first.dtype), []).append(max(one.num_bytes for one in each))
    passed += sum(messages(collective, lengths, world_size) for (_, collective, _), lengths in fused.items())
    return Work(
        world_size,
        max(sum(one.num_bytes for one in rank) for rank in both),
        max(sum(one.on_wire for one in rank) for rank in both),
        sum(max(one.line for one in each) for _, each in begun),
        len(begun),
        1,
        passed,
    )


def messages(collective: str, lengths: Sequence[int], world_size: int) -> int:
    """Return the messages that wait for each other, of all-reduces or all-gathers that begin together.

    Args:
        collective: their kind.
        lengths: their bytes.
        world_size: the number of ranks.
    """
    times = world_size if collective == "AllGather" else 1
    fused = min(len(lengths), max(1, ceil(times * sum(lengths) / FUSED)))
    return fused * (world_size - 1) * (1 if collective == "AllGather" else 2)


def stock(tensors: Mapping[str, tuple[int, ...]], world_size: int) -> Work:
    """Return the work of stock Horovod, dense in float32."""
    dense = [Request.of("AllReduce", "float32", 4 * prod(shape), world_size) for shape in tensors.values()]
    return work_of([(0, [one]) for one in dense], world_size)


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
            "link": 8 * points["line"] / points["rate"],
            "byte": points["shared"] * points["line"],
            "call": points["shared"] * points["calls"],
            "round": points["rounds"],
            "codec": points["shared"] * points["codec"],
        }
    )
