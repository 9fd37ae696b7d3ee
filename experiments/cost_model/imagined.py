"""Which collectives a method requests among any number of ranks: one or two ranks run, the others are imagined."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from hvdcompress.engine.rehearsal import anonymous, begin, blank_state, context_of, rehearse, round_of
from hvdcompress.method import AllGather, AllReduce, AllToAll, Array, Broadcast, Collective, Method, TensorSpec

__all__ = ["Request", "Rounds", "last_phase", "piggyback", "requests"]


class Request(NamedTuple):
    """A collective as one rank requests it.

    Attributes:
        collective: "AllReduce", "AllGather", "Broadcast" or "AllToAll".
        op: the reduction of an all-reduce.
        dtype: of the payload.
        num_bytes: what the rank passes to the collective.
        keeps: of an all-to-all with unequal pieces, the bytes of the rank's own piece.
        recv_bytes: of the same, the bytes from other ranks.
        pieces: of the same, from how many others they come.
    """

    collective: str
    op: str
    dtype: str
    num_bytes: int
    keeps: int | None = None
    recv_bytes: int = 0
    pieces: int = 0


Rounds = tuple[tuple[Request, ...], ...]  #: the collectives in their order, each as the ranks that run request it
TRIED = (2, 3, 5)


def last_phase(method: Method) -> int:
    """Return the number of the method's last phase, the compressed one."""
    return len(method.phases) - 1


def piggyback(method: Method, phase: int, spec: TensorSpec) -> bool:
    """Return whether the stock all-reduce carries the method's payload."""
    return method.piggyback(spec, phase, blank_state(method, spec, _components(method, phase, spec))) is not None


def requests(method: Method, phase: int, world_size: int, spec: TensorSpec) -> Rounds:
    """Return the collectives of a method on a tensor of full size, without running all ranks.

    Rank 0 runs, and rank 1 if the ranks' payloads differ in length; the others are assumed to send the same as these.
    So it takes the memory of two ranks at most. If 2, 3 and 5 ranks request the same collectives, and ``num_bytes`` is
    the same for ``world_size``, that many are not run.

    Args:
        method: the method.
        phase: its phase.
        world_size: the number of ranks.
        spec: the tensor.
    """
    plain = anonymous(method, spec)
    if world_size > max(TRIED):
        few = [_requests(method, phase, p, plain) for p in TRIED]
        totals = {_num_bytes(method, phase, p, plain) for p in (*TRIED, world_size)}
        if len(totals) == 1 and few[0] == few[1] == few[2]:
            return few[0]
    return _requests(method, phase, world_size, plain)


@cache
def _requests(method: Method, phase: int, world_size: int, spec: TensorSpec) -> Rounds:
    """Run rank 0 (and 1), as if all ranks sent what it sends, until only decoding is left."""
    small = rehearse(method, phase, 3, spec)
    kinds = [round.collective for round in small]
    # Payloads that are gathered last need not be decoded: for thousands of ranks that would take hours
    gathers = kinds.count("AllGather") if kinds and kinds[-1] == "AllGather" else -1
    components = _components(method, phase, spec)
    x = np.zeros(spec.size, spec.dtype)
    crew = range(min(world_size, 2 if method.variable_length else 1))
    exchanges = [begin(method, context_of(method, phase, rank, world_size, spec), x, components) for rank in crew]
    found: list[tuple[Request, ...]] = []
    seen: dict[int, Array] = {}
    results: list[Any] = [None for _ in crew]
    try:
        while gathers:
            collectives = [exchange.send(result) for exchange, result in zip(exchanges, results, strict=True)]
            found.append(tuple(_request(collective) for collective in collectives))
            gathers -= isinstance(collectives[0], AllGather)
            if gathers:
                results = _answers(collectives, world_size, seen)
    except StopIteration:
        pass
    finally:
        for exchange in exchanges:
            exchange.close()
    return tuple(found)


def _request(collective: Collective) -> Request:
    round = round_of(collective)
    num_bytes = collective.num_bytes if isinstance(collective, Broadcast) else collective.x.nbytes
    if isinstance(collective, AllToAll) and collective.receives is not None:
        return Request(*round, num_bytes, 0, sum(collective.receives), sum(map(bool, collective.receives)))
    return Request(*round, num_bytes)


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
        return [[np.split(collective.x, world_size)[rank]] * world_size for rank, collective in enumerate(collectives)]
    for collective in collectives:
        seen |= {len(piece): piece for piece in np.split(collective.x, np.cumsum(collective.splits)[:-1])}
    return [
        [seen.get(length, np.zeros(length, np.uint8)) if length else collective.x[:0] for length in collective.receives]
        for collective in collectives
    ]


def _num_bytes(
    method: Method, phase: int, world_size: int, spec: TensorSpec, state: dict[str, Array] | None = None
) -> int:
    if len(method.phases) == 1:
        return method.num_bytes(spec, world_size)
    return method.num_bytes(spec, world_size, phase, state)  # type: ignore[call-arg]


@cache
def _components(method: Method, phase: int, spec: TensorSpec) -> int:
    """Return the smallest value of the state's integers with which the method sends as many bytes as it predicts."""
    state = blank_state(method, spec, 1)
    counts = [array for array in state.values() if array.dtype.kind in "iu"]
    expected = _num_bytes(method, phase, 2, spec)
    for whole in range(1, spec.size + 1 if counts else 1):
        for count in counts:
            count[:] = whole
        if _num_bytes(method, phase, 2, spec, state) == expected:
            return whole
    return 1
