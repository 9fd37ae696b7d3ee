"""Which collectives a method asks for among any number of workers: one or two ranks run, the others are imagined."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from hvdcompress.engine.rehearsal import anonymous, begin, blank_state, context_of, rehearse, round_of
from hvdcompress.method import AllGather, AllReduce, AllToAll, Array, Broadcast, Collective, Method, TensorSpec
from hvdcompress.ops import fast

__all__ = ["Asked", "Rounds", "imagine", "last_phase", "piggyback", "watch"]


class Asked(NamedTuple):
    """A collective as one rank asks for it.

    ``num_bytes``: what the rank hands over. Of an all-to-all whose pieces differ in length: ``keeps`` (bytes of the
    rank's own piece), ``gets`` (bytes from others) and ``pieces`` (from how many others).
    """

    collective: str
    op: str
    dtype: str
    num_bytes: int
    keeps: int | None = None
    recv_bytes: int = 0
    pieces: int = 0


#: the collectives in their order, each as the ranks that were watched ask for it
Rounds = tuple[tuple[Asked, ...], ...]
TRIED = (2, 3, 5)


def last_phase(method: Method) -> int:
    """The number of the method's last phase, the compressed one."""
    return len(method.phases) - 1


def piggyback(method: Method, phase: int, spec: TensorSpec) -> bool:
    """Whether the stock all-reduce carries the method's payload."""
    return method.piggyback(spec, phase, blank_state(method, spec, _components(method, phase, spec))) is not None


def imagine(method: Method, phase: int, world_size: int, spec: TensorSpec) -> Rounds:
    """The collectives of a method in full size, without running all ranks.

    Rank 0 runs, and rank 1 where ranks' payloads differ in length; the others are assumed to send the same. So it takes
    the memory of two ranks at most, and gathered payloads are not decoded where nothing is sent after that. If 2, 3
    and 5 ranks ask for the same collectives, and ``num_bytes`` is the same for ``world_size``, they are not run for it.

    Args:
        method: whose collectives.
        phase: the method's phase.
        world_size: the number of ranks.
        spec: the tensor.
    """
    plain = anonymous(method, spec)
    if world_size > max(TRIED):
        few = [_imagine(method, phase, p, plain) for p in TRIED]
        totals = {_num_bytes(method, phase, p, plain) for p in (*TRIED, world_size)}
        if len(totals) == 1 and few[0] == few[1] == few[2]:
            return few[0]
    return _imagine(method, phase, world_size, plain)


@cache
def _imagine(method: Method, phase: int, world_size: int, spec: TensorSpec) -> Rounds:
    return watch(method, phase, world_size, spec, np.zeros(spec.size, spec.dtype), to_the_end=False)[0]


def watch(
    method: Method, phase: int, world_size: int, spec: TensorSpec, x: Array, to_the_end: bool = True
) -> tuple[Rounds, float]:
    """Run rank 0 (and 1), as if all ranks sent what it sends, and time it.

    Where a payload must come that none of these ranks made, an earlier one of the same length is taken.

    Args:
        method: the method.
        phase: its phase.
        world_size: the number of ranks.
        spec: the tensor.
        x: each rank's gradient, [n].
        to_the_end: also decode what the last collective brings.

    Returns:
        The collectives, and the seconds that rank 0 computed.
    """
    small = rehearse(method, phase, 3, spec)
    gathers = (
        sum(round.collective == "AllGather" for round in small) if small and small[-1].collective == "AllGather" else -1
    )
    whole = _components(method, phase, spec)
    crew = range(min(world_size, 2 if method.variable_length else 1))
    exchanges = [begin(method, context_of(method, phase, rank, world_size, spec), x, whole) for rank in crew]
    asked: list[tuple[Asked, ...]] = []
    seen: dict[int, Array] = {}
    results: list[Any] = [None for _ in crew]
    seconds = 0.0
    try:
        while True:
            collectives = []
            for exchange, result in zip(exchanges, results, strict=True):
                began = time.perf_counter()
                try:
                    collectives.append(exchange.send(result))
                finally:
                    seconds += time.perf_counter() - began if exchange is exchanges[0] else 0.0
            asked.append(tuple(_asked(collective) for collective in collectives))
            gathers -= isinstance(collectives[0], AllGather)
            if gathers == 0 and not to_the_end:
                return tuple(asked), seconds
            began = time.perf_counter()
            results = _answers(collectives, world_size, seen)
            if isinstance(collectives[0], Broadcast):  # all wait for what its root computes
                seconds += time.perf_counter() - began
    except StopIteration as stop:
        out, began = np.full(spec.size, 0.0, spec.dtype), time.perf_counter()
        fast.write(out, stop.value.total, 1.0 / world_size)
        return tuple(asked), seconds + time.perf_counter() - began
    finally:
        for exchange in exchanges:
            exchange.close()


def _asked(collective: Collective) -> Asked:
    round = round_of(collective)
    num_bytes = collective.num_bytes if isinstance(collective, Broadcast) else collective.x.nbytes
    if isinstance(collective, AllToAll) and collective.receives is not None:
        return Asked(*round, num_bytes, 0, sum(collective.receives), sum(map(bool, collective.receives)))
    return Asked(*round, num_bytes)


def _answers(collectives: Sequence[Any], world_size: int, seen: dict[int, Array]) -> list[Any]:
    """The result of a collective for each rank that runs; ``seen``: payloads by length."""
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
    """The smallest value of the state's whole numbers with which the method sends as many bytes as it predicts."""
    state = blank_state(method, spec, 1)
    counts = [array for array in state.values() if array.dtype.kind in "iu"]
    expected = _num_bytes(method, phase, 2, spec)
    for whole in range(1, spec.size + 1 if counts else 1):
        for count in counts:
            count[:] = whole
        if _num_bytes(method, phase, 2, spec, state) == expected:
            return whole
    return 1
