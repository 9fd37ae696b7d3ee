"""The cost model: seconds of an exchange among any number of ranks p, over links of any rate.

An exchange is described by its :class:`Work`, which comes from the methods themselves (:func:`work`). It costs::

    seconds = message · messages that wait for each other      α of Hockney 1994
            + link    · 8 · line / rate                        β; 1 is a link without headers
            + byte    · shared · line                          what the CPU spends on each byte, whatever the link
            + call    · shared · collectives                   of each collective, before fusion
            + round   · rounds                                 one waits for another: under Horovod, its negotiation
            + codec   · shared · codec seconds                 γ; timed in one process (``codecs.py``)

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

from collections.abc import Callable, Mapping, Sequence
from math import ceil, prod
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd

from experiments.cost_model.imagined import Request, Rounds, last_phase, piggyback, requests
from hvdcompress.engine.agreement import Status
from hvdcompress.engine.telemetry.ledger import Ledger
from hvdcompress.engine.telemetry.observer import Sent
from hvdcompress.method import Method, TensorSpec
from hvdcompress.plan import BY_NAME, IN_ORDER, Bucket, Plan

__all__ = [
    "CONSTANTS",
    "Codec",
    "Driver",
    "Work",
    "costs",
    "features",
    "gathered",
    "messages",
    "on_wire",
    "stock",
    "work",
]

Driver = Literal["horovod", "mpi4py"]  #: whose exchange it is: PyTorch's under Horovod, or MPI's
GROUPINGS = {"horovod": BY_NAME, "mpi4py": IN_ORDER}  #: which tensors travel together
STATUSES = {"horovod": 1, "mpi4py": 2}  #: before waiting; or before the first collective and after the last
FUSED = 128 * 2**20  # bytes: Horovod sends tensors that come together in one collective of up to so many
#: With each tensor: a probe of 8 bytes, by which the PyTorch driver tells Average from Sum
PLACEHOLDER = Request("AllReduce", "sum", "float32", 8)
STATUS = Request("AllReduce", "max", "float64", 8 * len(Status().numbers()))
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


def on_wire(request: Request, world_size: int) -> float:
    """Return the bytes that a rank transmits for a collective, by the ledger's formulas."""
    ledger = Ledger(world_size)
    splits = None if request.keeps is None else (request.keeps,)
    ledger.sent(0, "", Sent(request.collective, None, request.num_bytes, splits=splits))
    return ledger.tensors(0)[""].on_wire


def messages(collective: str, lengths: Sequence[int], world_size: int, partners: int | None = None) -> int:
    """Return the messages that wait for each other, of collectives of one kind that begin together.

    Args:
        collective: their kind. Horovod fuses all but all-to-alls.
        lengths: their bytes.
        world_size: the number of ranks.
        partners: with how many others a rank exchanges in each all-to-all; None: with all.
    """
    if collective == "AllToAll":
        return len(lengths) * (world_size - 1 if partners is None else partners)
    times = world_size if collective == "AllGather" else 1
    fused = min(len(lengths), max(1, ceil(times * sum(lengths) / FUSED)))
    return fused * (world_size - 1) * (1 if collective == "AllGather" else 2)


def gathered(rounds: Rounds, world_size: int) -> tuple[int, float]:
    """Return the number of payloads that rank 0 reads one by one, and their bytes: of all-gathers and all-to-alls."""
    pieces, num_bytes = 0, 0.0
    for request, *_ in rounds:
        if request.collective == "AllGather":
            pieces, num_bytes = pieces + world_size, num_bytes + world_size * request.num_bytes
        elif request.collective == "AllToAll":
            even = request.keeps is None
            pieces += world_size if even else request.pieces
            num_bytes += request.num_bytes if even else request.recv_bytes
    return pieces, num_bytes


class Exchange(NamedTuple):
    """What one bucket requests, in its method's last phase.

    Attributes:
        method: the method.
        parts: per tensor that the method runs on, its elements and its collectives.
        rounds: the bucket's collectives in their order, each as the ranks that run request it.
        placeholders: tensors for which the PyTorch driver gives Horovod a placeholder.
        rides: whether one of these rides along with the payload.
    """

    method: Method
    parts: list[tuple[int, Rounds]]
    rounds: list[list[Request]]
    placeholders: int
    rides: bool

    @classmethod
    def of(cls, bucket: Bucket, world_size: int) -> Exchange:
        """Find out what a bucket requests among so many ranks."""
        method = bucket.program.main
        phase = last_phase(method)
        rides = len(bucket.members) == 1 and piggyback(method, phase, bucket.spec)
        passes = rides and method.identity and method.feedback == "none"  # Horovod reduces the gradient itself
        specs = bucket.members if bucket.runs_per_tensor(method) else [bucket.spec]
        parts = [(spec.size, requests(method, phase, world_size, spec)) for spec in specs]
        together = zip(*(rounds for _, rounds in parts), strict=True)
        rounds = [[_joined(each) for each in zip(*tensors, strict=True)] for tensors in together]
        return cls(method, parts, rounds, 0 if passes else len(bucket.members), rides and not passes)

    def codec_seconds(self, codec: Codec, world_size: int) -> float:
        """Return the seconds that a rank computes."""
        features = [(1, size, *gathered(rounds, world_size)) for size, rounds in self.parts]
        return float(np.sum(np.array(features) @ np.array(codec)))


def _joined(together: Sequence[Request]) -> Request:
    """Return the request of tensors that travel together."""
    first = together[0]
    return first._replace(
        num_bytes=sum(one.num_bytes for one in together),
        keeps=None if first.keeps is None else sum(one.keeps or 0 for one in together),
        recv_bytes=sum(one.recv_bytes for one in together),
        pieces=max(one.pieces for one in together),
    )


def work(
    plan: Plan,
    tensors: Mapping[str, tuple[int, ...]],
    world_size: int,
    codec: Callable[[Method], Codec] | None = None,
    driver: Driver | None = "horovod",
) -> Work:
    """Return the work of an exchange under a plan, in its last stage and phase.

    Args:
        plan: the methods.
        tensors: shapes by name.
        world_size: the number of ranks.
        codec: gives a method's codec; without it, the codec's seconds are 0.
        driver: include what this one adds: a status or two and, under Horovod, a placeholder for each tensor. None: the
            methods' collectives alone, of each tensor by itself.
    """
    specs = (TensorSpec(name, shape) for name, shape in tensors.items())
    buckets = plan.buckets(specs, GROUPINGS[driver] if driver else None)
    exchanges = [Exchange.of(bucket, world_size) for bucket in buckets]
    every = [(at, each) for exchange in exchanges for at, each in enumerate(exchange.rounds)]
    rounds = max((len(exchange.rounds) for exchange in exchanges), default=0)
    rides = 0
    if driver == "horovod":
        every += [(0, [PLACEHOLDER]) for exchange in exchanges for _ in range(exchange.placeholders)]
        rides = sum(exchange.rides for exchange in exchanges)
    statuses = STATUSES[driver] if driver else 0
    every += [(-1 - number, [STATUS]) for number in range(statuses)]
    together: dict[tuple[int, Kind], list[int]] = {}
    for at, each in every:  # what begins together and is of one kind travels as one
        together.setdefault((at, Kind.of(each)), []).append(max(one.num_bytes for one in each))
    seconds = sum(one.codec_seconds(codec(one.method), world_size) for one in exchanges) if codec else 0.0
    both = [[each[min(place, len(each) - 1)] for _, each in every] for place in (0, 1)]  # ranks 0 and 1
    return Work(
        world_size,
        max(sum(one.num_bytes for one in rank) for rank in both),
        max(sum(on_wire(one, world_size) for one in rank) for rank in both),
        sum(max(max(on_wire(one, world_size), one.recv_bytes) for one in each) for _, each in every),
        len(every) - rides,
        rounds + statuses,
        sum(messages(of.collective, lengths, world_size, of.partners) for (_, of), lengths in together.items()),
        seconds,
    )


class Kind(NamedTuple):
    """What collectives must have in common to travel as one; a broadcast travels as a sum."""

    collective: str
    dtype: str
    partners: int | None  #: of an all-to-all with unequal pieces

    @classmethod
    def of(cls, each: Sequence[Request]) -> Kind:
        """Return the kind of a collective."""
        collective = "AllReduce" if each[0].collective == "Broadcast" else each[0].collective
        uneven = collective == "AllToAll" and each[0].keeps is not None
        return cls(collective, each[0].dtype, max(1, *(one.pieces for one in each)) if uneven else None)


def stock(tensors: Mapping[str, tuple[int, ...]], world_size: int) -> Work:
    """Return the work of stock Horovod, dense in float32."""
    lengths = [4 * prod(shape) for shape in tensors.values()]
    wire = on_wire(Request("AllReduce", "sum", "float32", sum(lengths)), world_size)
    passed = messages("AllReduce", lengths, world_size)
    return Work(world_size, sum(lengths), wire, wire, len(lengths), 1, passed)


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
