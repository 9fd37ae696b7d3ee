"""The cost of an exchange among any number of workers: an α-β-γ model, and its fit to measured exchanges.

One exchange asks for collectives (:func:`work`), and each costs something of five kinds::

    seconds = α · messages that wait for each other            2(p − 1) an all-reduce, p − 1 an all-gather or all-to-all
            + β · 8 · bytes on the link / rate                 as rings carry them; β = 1 is a link without headers
            + δ · bytes                                        what the processors spend on them, whatever the link
            + ν · collectives + κ · rounds                     of each collective, and of each round: under Horovod, its
                                                               negotiation
            + γ · seconds of the codec                         as timed in one process: :class:`Codec`

(Hockney 1994; Thakur, Rabenseifner and Gropp 2005 for the collectives.) Where p ranks share fewer processors, the
processors' work takes p/processors as long. Collectives run as rings, as in ``ledger.py``; an all-reduce by a tree
would need fewer messages. Nothing overlaps in the model; where it does on a machine, the fitted γ is below 1. Each
driver has constants of its own (:data:`Driver`).
``imagined.imagine`` finds out which collectives a method asks for: nothing here depends on any method.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from math import ceil, prod
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy.optimize import nnls

from experiments.scale import imagined
from experiments.scale.imagined import Asked, Rounds
from hvdcompress.engine.agreement import Status
from hvdcompress.engine.telemetry.ledger import Ledger
from hvdcompress.engine.telemetry.observer import Sent
from hvdcompress.method import Method, TensorSpec
from hvdcompress.plan import BY_NAME, IN_ORDER, Bucket, Plan

__all__ = [
    "Codec",
    "Constants",
    "Driver",
    "Errors",
    "Exchange",
    "Point",
    "Work",
    "errors",
    "exchange_of",
    "fit",
    "stock",
    "work",
]

Driver = Literal["horovod", "mpi4py"]  #: whose exchange it is: PyTorch's under Horovod, or MPI's
GROUPINGS = {"horovod": BY_NAME, "mpi4py": IN_ORDER}  #: which tensors travel together
STATUSES = {"horovod": 1, "mpi4py": 2}  #: before waiting; or before the first collective, and after the last
FUSED = 128 * 2**20  # bytes: Horovod sends tensors that come together in one collective of up to so many
#: with each tensor's collectives: a probe of 8 bytes, by which the PyTorch driver tells Average from Sum
PLACEHOLDER = Asked("AllReduce", "sum", "float32", 8)
STATUS = Asked("AllReduce", "max", "float64", 8 * len(Status().numbers()))


# -- what is asked for ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """The work of one exchange, on the rank that has most of it.

    ``sent``, ``on_wire``: as in the ledger. ``line``: bytes that pass one after the other, as a rank that only
    receives in a round keeps the others waiting. ``calls``: collectives, before they are fused; ``rounds``: how many
    must follow each other; ``messages``: how many of their messages must. ``codec``: seconds.
    """

    world_size: int
    sent: float
    on_wire: float
    line: float
    calls: int
    rounds: int
    messages: int
    codec: float = 0.0


@dataclass(frozen=True)
class Codec:
    """Seconds of one rank's codec: of each tensor, element, gathered payload, and byte of gathered payloads."""

    tensor: float = 0.0
    element: float = 0.0
    piece: float = 0.0
    byte: float = 0.0

    def seconds(self, elements: int, pieces: int, num_bytes: float) -> float:
        """For one tensor."""
        return self.tensor + self.element * elements + self.piece * pieces + self.byte * num_bytes


def on_wire(asked: Asked, world_size: int) -> float:
    """Bytes that a rank transmits for a collective, by the ledger's formulas."""
    ledger = Ledger(world_size)
    splits = None if asked.keeps is None else (asked.keeps,)
    ledger.sent(0, "", Sent(asked.collective, None, asked.num_bytes, splits=splits))
    return ledger.tensors(0)[""].on_wire


def gathered(rounds: Rounds, world_size: int) -> tuple[int, float]:
    """Payloads, and their bytes, that rank 0 reads one by one: those of all-gathers and all-to-alls."""
    pieces, num_bytes = 0, 0.0
    for asked, *_ in rounds:
        if asked.collective == "AllGather":
            pieces, num_bytes = pieces + world_size, num_bytes + world_size * asked.num_bytes
        elif asked.collective == "AllToAll":
            even = asked.keeps is None
            pieces += world_size if even else asked.pieces
            num_bytes += asked.num_bytes if even else asked.recv_bytes
    return pieces, num_bytes


def messages(collective: str, lengths: Sequence[int], world_size: int, partners: int | None = None) -> int:
    """Messages that wait for each other when collectives of one kind begin together, and Horovod fuses what it can.

    ``partners``: with how many others a rank has to do in each all-to-all, where that is not all of them.
    """
    if collective == "AllToAll":
        return len(lengths) * (world_size - 1 if partners is None else partners)
    times = world_size if collective == "AllGather" else 1
    fused = min(len(lengths), max(1, ceil(times * sum(lengths) / FUSED)))
    return fused * (world_size - 1) * (1 if collective == "AllGather" else 2)


def work(
    plan: Plan,
    tensors: Mapping[str, tuple[int, ...]],
    world_size: int,
    codec: Callable[[Method], Codec] | None = None,
    driver: Driver | None = "horovod",
) -> Work:
    """The work of an exchange under a plan, in its last stage and phase.

    Args:
        plan: the methods.
        tensors: shapes by name.
        world_size: the number of ranks.
        codec: gives a method's codec; without it, the codec's seconds are 0.
        driver: include what this one adds: a status or two and, under Horovod, a placeholder for each tensor. None: the
            methods' collectives alone, of each tensor by itself.
    """
    sent, wire, passing, calls, seconds, rounds = [0.0, 0.0], [0.0, 0.0], 0.0, 0, 0.0, 0
    together: dict[tuple[int, Kind], list[int]] = {}

    def add(number: int, each: Sequence[Asked]) -> None:
        nonlocal passing, calls
        calls += 1
        for place in (0, 1):
            one = each[min(place, len(each) - 1)]
            sent[place] += one.num_bytes
            wire[place] += on_wire(one, world_size)
        passing += line(each, world_size)
        together.setdefault((number, kind(each)), []).append(max(one.num_bytes for one in each))

    grouping = GROUPINGS[driver] if driver else None
    for bucket in plan.buckets((TensorSpec(name, shape) for name, shape in tensors.items()), grouping):
        exchange = exchange_of(bucket, world_size)
        for number, each in enumerate(exchange.rounds):
            add(number, each)
        rounds = max(rounds, len(exchange.rounds))
        if codec:
            one = codec(exchange.method)
            seconds += sum(one.seconds(size, *gathered(asked, world_size)) for size, asked in exchange.parts)
        if driver == "horovod":
            for _ in range(exchange.placeholders):
                add(0, [PLACEHOLDER])
            calls -= exchange.rides
    for number in range(STATUSES[driver] if driver else 0):
        add(-1 - number, [STATUS])
        rounds += 1
    passed = sum(
        messages(collective, lengths, world_size, partners)
        for (_, (collective, _, partners)), lengths in together.items()
    )
    return Work(world_size, max(sent), max(wire), passing, calls, rounds, passed, seconds)


#: what collectives must have alike to travel as one: the collective, the dtype, and of uneven all-to-alls the partners
Kind = tuple[str, str, int | None]


def kind(each: Sequence[Asked]) -> Kind:
    """The kind of a collective, of which ranks ask for ``each``; a broadcast travels as a sum."""
    collective = "AllReduce" if each[0].collective == "Broadcast" else each[0].collective
    uneven = collective == "AllToAll" and each[0].keeps is not None
    return collective, each[0].dtype, max(1, *(one.pieces for one in each)) if uneven else None


def line(each: Sequence[Asked], world_size: int) -> float:
    """Bytes of a collective that pass one after the other."""
    return max(max(on_wire(one, world_size), one.recv_bytes) for one in each)


@dataclass(frozen=True)
class Exchange:
    """What one bucket asks for.

    ``parts``: what its method runs on, as elements, and what it asks for there; ``rounds``: the bucket's collectives in
    their order, each as the ranks that were watched ask for it; ``placeholders``: tensors for which the PyTorch driver
    gives Horovod a placeholder, one of which ``rides`` along with the payload.
    """

    method: Method
    parts: Sequence[tuple[int, Rounds]]
    rounds: Sequence[Sequence[Asked]]
    placeholders: int
    rides: bool


def exchange_of(bucket: Bucket, world_size: int) -> Exchange:
    """What a bucket asks for among so many ranks, in its method's last phase."""
    method = bucket.program.main
    phase = imagined.last_phase(method)
    rides = len(bucket.members) == 1 and imagined.piggyback(method, phase, bucket.spec)
    passes = rides and method.identity and method.feedback == "none"
    specs = bucket.members if bucket.runs_per_tensor(method) else [bucket.spec]
    parts = [(spec.size, imagined.imagine(method, phase, world_size, spec)) for spec in specs]
    rounds = [
        [_one(each) for each in zip(*every, strict=True)] for every in zip(*(asked for _, asked in parts), strict=True)
    ]
    return Exchange(method, parts, rounds, 0 if passes else len(bucket.members), rides and not passes)


def _one(together: Sequence[Asked]) -> Asked:
    """What tensors that travel together ask for."""
    first = together[0]
    num_bytes, gets = sum(one.num_bytes for one in together), sum(one.recv_bytes for one in together)
    keeps = None if first.keeps is None else sum(one.keeps or 0 for one in together)
    return Asked(first.collective, first.op, first.dtype, num_bytes, keeps, gets, max(one.pieces for one in together))


def stock(tensors: Mapping[str, tuple[int, ...]], world_size: int) -> Work:
    """The work of stock Horovod, dense in float32."""
    num_bytes = 4 * sum(prod(shape) for shape in tensors.values())
    wire = on_wire(Asked("AllReduce", "sum", "float32", num_bytes), world_size)
    passed = messages("AllReduce", [4 * prod(shape) for shape in tensors.values()], world_size)
    return Work(world_size, num_bytes, wire, wire, len(tensors), 1, passed)


# -- what it costs -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Constants:
    """The model's; see the module's text. All in seconds, but for ``link`` (β) and ``codec`` (γ), which are factors."""

    message: float = 0.0
    link: float = 0.0
    byte: float = 0.0
    call: float = 0.0
    round: float = 0.0
    codec: float = 0.0

    def parts(self, work: Work, rate: float, shared: float = 1.0) -> dict[str, float]:
        """Seconds of an exchange over links of ``rate`` bits per second, by what they are spent on.

        ``shared``: ranks that share a processor.
        """
        given = zip(fields(self), astuple(self), _features(work, rate, shared), strict=True)
        return {field.name: constant * feature for field, constant, feature in given}

    def seconds(self, work: Work, rate: float, shared: float = 1.0) -> float:
        """Their sum."""
        return sum(self.parts(work, rate, shared).values())


def _features(work: Work, rate: float, shared: float) -> list[float]:
    """The factors of the :class:`Constants`, in their order."""
    return [
        work.messages,
        8 * work.line / rate,
        shared * work.line,
        shared * work.calls,
        work.rounds,
        shared * work.codec,
    ]


@dataclass(frozen=True)
class Point:
    """A measured exchange: what it was, what it asked for, over which links, and how long it took (a median)."""

    label: str
    set: str
    rate: float  #: bits per second
    shared: float  #: ranks that share a processor, at least 1
    seconds: float
    work: Work

    def to_dict(self) -> dict[str, Any]:
        """For a line of JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Point:
        """Read what :meth:`to_dict` made.

        Raises:
            ValueError: it is not a point.
        """
        try:
            return cls(**{**given, "work": Work(**given["work"])})
        except (TypeError, KeyError) as error:
            raise ValueError(f"this is not a measured exchange: {error}") from None


def sharing(ranks: int, processors: int | None = None) -> float:
    """The number of ranks that share the busiest of this machine's processors (or of ``processors``); 1 at least.

    Emulated hosts keep to one each, and the last to end ends an exchange.
    """
    return float(ceil(ranks / (processors or len(os.sched_getaffinity(0)))))


def fit(points: Sequence[Point]) -> Constants:
    """The constants, none of them negative, with the least squares of *relative* errors.

    Raises:
        ValueError: there are fewer points than constants.
    """
    if len(points) < len(fields(Constants)):
        raise ValueError(f"{len(points)} measured exchanges are too few for {len(fields(Constants))} constants")
    rows = np.array([_features(point.work, point.rate, point.shared) for point in points])
    rows /= np.array([[point.seconds] for point in points])
    scale = np.maximum(rows.max(axis=0), 1e-300)  # of seconds and of bytes: far apart
    found, _ = nnls(rows / scale, np.ones(len(points)), maxiter=10_000)
    return Constants(*(found / scale).tolist())


class Errors(NamedTuple):
    """|predicted − measured| ÷ measured over some points; ``which`` is the worst one."""

    median: float
    worst: float
    which: str
    points: int


def errors(constants: Constants, points: Iterable[Point]) -> Errors:
    """Compare predictions with measured times.

    Raises:
        ValueError: there are no points.
    """
    found = [
        (abs(constants.seconds(point.work, point.rate, point.shared) / point.seconds - 1), str(point.label), point)
        for point in points
    ]
    if not found:
        raise ValueError("no measured exchange was held out")
    worst, label, point = max(found, key=lambda each: each[:2])
    where = f"{label} on {point.set}, {point.work.world_size} hosts, {point.rate / 1e6:g} Mbit/s"
    return Errors(statistics.median(each[0] for each in found), worst, where, len(found))
