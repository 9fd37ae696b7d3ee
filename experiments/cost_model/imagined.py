"""Which collectives a method requests among any number of ranks: one or two ranks run, the others are imagined."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from hvdcompress.engine.lockstep import anonymous, begin, blank_state, context_of, rehearse, round_of
from hvdcompress.engine.telemetry.ledger import Ledger
from hvdcompress.engine.telemetry.observer import Sent
from hvdcompress.method import AllGather, AllReduce, AllToAll, Array, Broadcast, Collective, Method, TensorSpec


class Request(NamedTuple):
    """A collective as one rank requests it.

    Attributes:
        collective: "AllReduce", "AllGather" or "AllToAll"; a broadcast travels as a sum.
        dtype: of the payload.
        num_bytes: what the rank passes to the collective.
        on_wire: bytes that it transmits, by the ledger's formulas.
        line: bytes that pass one after the other: a rank that only receives in a round keeps the others waiting.
        pieces: payloads that the rank reads one by one, of all-gathers and all-to-alls.
        gathered: their bytes.
        farthest: of an all-to-all, the last rank that sends to it.
    """

    collective: str
    dtype: str
    num_bytes: int
    on_wire: float
    line: float
    pieces: int = 0
    gathered: int = 0
    farthest: int = 0

    @classmethod
    def of(
        cls, collective: str, dtype: str, num_bytes: int, world_size: int, receives: Sequence[int] | None = None
    ) -> Request:
        """Return the request of ``num_bytes`` among so many ranks.

        Args:
            collective: its kind.
            dtype: of the payload.
            num_bytes: of the payload.
            world_size: the number of ranks.
            receives: of an all-to-all with unequal pieces, the bytes from each rank, none from the rank itself.
        """
        ledger = Ledger(world_size)
        ledger.sent(0, "", Sent(collective, None, num_bytes, splits=None if receives is None else (0,)))
        wire = ledger.tensors(0)[""].on_wire
        if receives is not None:
            received = sum(receives)
            senders = np.flatnonzero(receives)
            farthest = int(senders.max(initial=0))
            return cls(collective, dtype, num_bytes, wire, max(wire, received), len(senders), received, farthest)
        if collective == "AllGather":
            return cls(collective, dtype, num_bytes, wire, wire, world_size, world_size * num_bytes)
        if collective == "AllToAll":
            return cls(collective, dtype, num_bytes, wire, wire, world_size, num_bytes, world_size - 1)
        return cls("AllReduce", dtype, num_bytes, wire, wire)


Rounds = tuple[tuple[Request, ...], ...]  #: the collectives in their order, each as the ranks that run request it


def last_phase(method: Method) -> int:
    """Return the number of the method's last phase, the compressed one."""
    return len(method.phases) - 1


def requests(method: Method, world_size: int, spec: TensorSpec) -> Rounds:
    """Return the collectives of a method's last phase on a tensor of full size, without running all ranks.

    Rank 0 runs, and rank 1 if the ranks' payloads differ in length; the others are assumed to send the same as these.
    So it takes the memory of two ranks at most.
    """
    return _requests(method, world_size, anonymous(method, spec))


@cache
def _requests(method: Method, world_size: int, spec: TensorSpec) -> Rounds:
    """Run rank 0 (and 1), as if all ranks sent what it sends, until only decoding is left."""
    phase = last_phase(method)
    kinds = [round.collective for round in rehearse(method, phase, 3, spec)]
    # Payloads that are gathered last need not be decoded: for thousands of ranks that would take hours
    gathers = kinds.count("AllGather") if kinds and kinds[-1] == "AllGather" else -1
    x = np.zeros(spec.size, spec.dtype)
    crew = [context_of(method, phase, rank, world_size, spec) for rank in range(2 if method.variable_length else 1)]
    exchanges = [begin(method, context, x, _components(method, spec)) for context in crew[:world_size]]
    found: list[tuple[Request, ...]] = []
    seen: dict[int, Array] = {}
    results: list[Any] = [None for _ in exchanges]
    try:
        while gathers:
            collectives = [exchange.send(result) for exchange, result in zip(exchanges, results, strict=True)]
            found.append(tuple(_request(collective, world_size) for collective in collectives))
            gathers -= isinstance(collectives[0], AllGather)
            if gathers:
                results = _answers(collectives, world_size, seen)
    except StopIteration:
        pass
    finally:
        for exchange in exchanges:
            exchange.close()
    return tuple(found)


def _request(collective: Collective, world_size: int) -> Request:
    kind = round_of(collective)
    num_bytes = collective.num_bytes if isinstance(collective, Broadcast) else collective.x.nbytes
    receives = collective.receives if isinstance(collective, AllToAll) else None
    return Request.of(kind.collective, kind.dtype, num_bytes, world_size, receives)


def _answers(collectives: Sequence[Any], world_size: int, seen: dict[int, Array]) -> list[Any]:
    """Return the result of a collective for each rank that runs.

    Args:
        collectives: of the ranks that run.
        world_size: the number of ranks.
        seen: earlier payloads of all-to-alls by length, which stand for those of imagined ranks; is updated.
    """
    first = collectives[0]
    if isinstance(first, AllReduce):
        return [first.x for _ in collectives]
    if isinstance(first, Broadcast):
        root = int(first.root)
        return [collectives[root if root < len(collectives) else 0].make()] * len(collectives)
    if isinstance(first, AllGather):
        return [[collectives[min(rank, len(collectives) - 1)].x for rank in range(world_size)]] * len(collectives)
    if first.receives is None:
        return [[_pieces(collective, world_size)[rank]] * world_size for rank, collective in enumerate(collectives)]
    for collective in collectives:
        seen |= {len(piece): piece for piece in _pieces(collective, world_size)}
    return [
        [seen.get(length, np.zeros(length, np.uint8)) if length else collective.x[:0] for length in collective.receives]
        for collective in collectives
    ]


def _pieces(collective: AllToAll, world_size: int) -> list[Array]:
    splits = collective.splits
    return np.split(collective.x, world_size if splits is None else np.cumsum(splits)[:-1])


@cache
def _components(method: Method, spec: TensorSpec) -> int:
    """Return the smallest value of the state's integers with which the method sends as many bytes as it predicts."""
    state = blank_state(method, spec, 1)
    counts = [array for array in state.values() if array.dtype.kind in "iu"]
    if not counts:
        return 1
    predicted: Any = method.num_bytes  # of methods with phases it has more arguments
    for whole in range(1, spec.size + 1):
        for count in counts:
            count[:] = whole
        if predicted(spec, 2, last_phase(method), state) == predicted(spec, 2, last_phase(method)):
            return whole
    return 1
