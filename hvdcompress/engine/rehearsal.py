"""Which collectives a method asks for in a phase, found out by running it once on a small tensor.

Within a phase the number, verbs and dtypes of collectives are fixed (the conformance suite checks it), so a driver
that must lay them out beforehand, as TensorFlow's graphs want it, can learn them from a rehearsal: all ranks in
lockstep, on zeros, in a shape that the method suits.

For worlds of any size :func:`imagine` runs one rank, or two where ranks do unlike things, and imagines the others.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from hvdcompress.loopback import RUN, cut
from hvdcompress.method import (
    AllGather,
    AllReduce,
    AllToAll,
    Array,
    Broadcast,
    Communication,
    Context,
    Method,
    TensorSpec,
    Verb,
)
from hvdcompress.ops import fast
from hvdcompress.parts import feedback


class Round(NamedTuple):
    """One collective: the verb's name, the operation of an all-reduce, and the dtype that it carries."""

    verb: str
    op: str
    dtype: str


def round_of(verb: Verb) -> Round:
    """What a verb is in a choreography."""
    dtype = "uint8" if not hasattr(verb, "x") else str(verb.x.dtype).removeprefix("torch.")
    return Round(type(verb).__name__, getattr(verb, "op", ""), dtype)


def small_shape(method: Method, spec: TensorSpec) -> tuple[int, ...]:
    """A small shape that the method suits; the tensor's own where none is found."""
    for shape in ((64,), (16, 16), (4, 12, 2, 3), (8, 16, 3, 3)):
        if math.prod(shape) < spec.size and method.suits(TensorSpec(spec.name, shape, layout=spec.layout)):
            return shape
    return spec.shape


def rehearse(method: Method, phase: int, world: int, spec: TensorSpec) -> tuple[Round, ...]:
    """The collectives of ``method`` in ``phase`` for tensors like ``spec``, in their order."""
    return tuple(round for round, _ in _rehearse(method, phase, world, small_shape(method, spec), *_kind(method, spec)))


def lengths(method: Method, phase: int, world: int, spec: TensorSpec) -> tuple[int, ...]:
    """The lengths of rank 0's payloads in these collectives (in bytes, of a broadcast), for a tensor of ``spec``; slow,
    as it is a rehearsal in full size."""
    return tuple(length for _, length in _rehearse(method, phase, world, spec.shape, *_kind(method, spec)))


def _kind(method: Method, spec: TensorSpec) -> tuple[str, str]:
    return spec.layout, "float64" if method.wide and spec.dtype == "float64" else "float32"


@cache
def _rehearse(
    method: Method, phase: int, world: int, shape: tuple[int, ...], layout: str, dtype: str
) -> tuple[tuple[Round, int], ...]:
    spec = TensorSpec("rehearsal", shape, dtype, layout)  # type: ignore[arg-type]
    x = np.zeros(spec.size, dtype)
    exchanges = [_begin(method, phase, rank, world, spec, x, 1) for rank in range(world)]
    rounds: list[tuple[Round, int]] = []
    try:
        verbs = [next(exchange) for exchange in exchanges]
        while True:
            rounds.append((round_of(verbs[0]), _length(verbs[0])))
            results, _ = RUN[type(verbs[0])](verbs)
            verbs = [exchange.send(result) for exchange, result in zip(exchanges, results, strict=True)]
    except StopIteration:
        return tuple(rounds)


def _begin(method: Method, phase: int, rank: int, world: int, spec: TensorSpec, x: Array, whole: int) -> Communication:
    """A rank's exchange with no history; its state's whole numbers (such as GradiVeQ's components) are ``whole``."""
    # full() and not zeros(): memory that is there, as in any step but the first
    spare = {name: np.full(spec.size, 0.0, np.float32) for name in feedback.names(method)}
    ctx = Context(rank, world, 0, spec, phase=phase)
    return feedback.exchange(method, x, 1.0, _state(method, spec, whole), spare, ctx, fast)


def _state(method: Method, spec: TensorSpec, whole: int) -> dict[str, Array]:
    state = {name: np.zeros(math.prod(s.shape), s.dtype) for name, s in feedback.slots(method, spec).items()}
    for count in (array for array in state.values() if array.dtype.kind in "iu"):
        count[:] = whole
    return state


def _length(verb: Verb) -> int:
    return verb.num_bytes if isinstance(verb, Broadcast) else len(verb.x)


# -- worlds of any size --------------------------------------------------------------------------------


class Asked(NamedTuple):
    """A collective as one rank asks for it. ``num_bytes``: what it hands over. Of an all-to-all whose pieces differ:
    ``keeps`` (bytes of the rank's own piece), ``gets`` (bytes from others) and ``pieces`` (how many bring some)."""

    verb: str
    op: str
    dtype: str
    num_bytes: int
    keeps: int | None = None
    gets: int = 0
    pieces: int = 0


#: the collectives in their order, each as the ranks that were watched ask for it
Rounds = tuple[tuple[Asked, ...], ...]
TRIED = (2, 3, 5)


def last_phase(method: Method) -> int:
    """The phase that a method is there for; its others come before it."""
    return len(method.phases) - 1


def piggyback(method: Method, phase: int, spec: TensorSpec) -> bool:
    """Whether all that the method does is what a stock all-reduce can carry."""
    return method.piggyback(spec, phase, _state(method, spec, _components(method, phase, spec))) is not None


def imagine(method: Method, phase: int, world: int, spec: TensorSpec) -> Rounds:
    """The collectives of ``method`` in ``phase`` among ``world`` ranks, for a tensor of ``spec``, in full size.

    Rank 0 runs, and rank 1 where ranks send unlike lengths; all others are imagined to send what it sends. So it
    takes the memory of two ranks at most, and a gathered payload is not decoded where nothing is sent after that.
    What 2, 3 and 5 ranks ask for alike, and ``num_bytes`` has no more of for ``world``, is taken to be the same there.
    """
    plain = TensorSpec("rehearsal", spec.shape, _kind(method, spec)[1], spec.layout)
    if world > max(TRIED):
        few = [_imagine(method, phase, p, plain) for p in TRIED]
        totals = {_num_bytes(method, phase, p, plain) for p in (*TRIED, world)}
        if len(totals) == 1 and few[0] == few[1] == few[2]:
            return few[0]
    return _imagine(method, phase, world, plain)


@cache
def _imagine(method: Method, phase: int, world: int, spec: TensorSpec) -> Rounds:
    return watch(method, phase, world, spec, np.zeros(spec.size, spec.dtype), to_the_end=False)[0]


def watch(
    method: Method, phase: int, world: int, spec: TensorSpec, x: Array, to_the_end: bool = True
) -> tuple[Rounds, float]:
    """What rank 0 (and 1) asks for when it has ``x`` [n], and the seconds that rank 0 computed for it and for its
    result.

    A payload is imagined to come from every rank; where one must come that nobody who runs has made, an earlier one of
    the same length.
    """
    small = rehearse(method, phase, 3, spec)
    gathers = sum(round.verb == "AllGather" for round in small) if small and small[-1].verb == "AllGather" else -1
    whole = _components(method, phase, spec)
    crew = range(min(world, 2 if method.uneven else 1))
    exchanges = [_begin(method, phase, rank, world, spec, x, whole) for rank in crew]
    asked: list[tuple[Asked, ...]] = []
    seen: dict[int, Array] = {}
    results: list[Any] = [None for _ in crew]
    seconds = 0.0
    try:
        while True:
            verbs = []
            for exchange, result in zip(exchanges, results, strict=True):
                began = time.perf_counter()
                try:
                    verbs.append(exchange.send(result))
                finally:
                    seconds += time.perf_counter() - began if exchange is exchanges[0] else 0.0
            asked.append(tuple(_asked(verb) for verb in verbs))
            gathers -= isinstance(verbs[0], AllGather)
            if gathers == 0 and not to_the_end:
                return tuple(asked), seconds
            began = time.perf_counter()
            results = _answers(verbs, world, seen)
            if isinstance(verbs[0], Broadcast):  # all wait for what its root computes
                seconds += time.perf_counter() - began
    except StopIteration as stop:
        out, began = np.full(spec.size, 0.0, spec.dtype), time.perf_counter()
        fast.write(out, stop.value.total, 1.0 / world)
        return tuple(asked), seconds + time.perf_counter() - began
    finally:
        for exchange in exchanges:
            exchange.close()


def _asked(verb: Verb) -> Asked:
    round = round_of(verb)
    num_bytes = verb.num_bytes if isinstance(verb, Broadcast) else verb.x.nbytes
    if isinstance(verb, AllToAll) and verb.receives is not None:
        return Asked(*round, num_bytes, 0, sum(verb.receives), sum(map(bool, verb.receives)))
    return Asked(*round, num_bytes)


def _answers(verbs: Sequence[Any], world: int, seen: dict[int, Array]) -> list[Any]:
    """What each rank that runs is given; ``seen``: payloads by length."""
    first = verbs[0]
    if isinstance(first, AllReduce):
        return [first.x for _ in verbs]
    if isinstance(first, Broadcast):
        root = int(first.root)
        return [verbs[root if root < len(verbs) else 0].make()] * len(verbs)
    if isinstance(first, AllGather):
        return [[verbs[min(rank, len(verbs) - 1)].x for rank in range(world)]] * len(verbs)
    if first.receives is None:
        return [[cut(v.x, [len(v.x) // world] * world)[rank]] * world for rank, v in enumerate(verbs)]
    for verb in verbs:
        seen |= {len(piece): piece for piece in cut(verb.x, verb.splits)}
    return [
        [seen.get(length, np.zeros(length, np.uint8)) if length else verb.x[:0] for length in verb.receives]
        for verb in verbs
    ]


def _num_bytes(method: Method, phase: int, world: int, spec: TensorSpec, state: dict[str, Array] | None = None) -> int:
    if len(method.phases) == 1:
        return method.num_bytes(spec, world)
    return method.num_bytes(spec, world, phase, state)  # type: ignore[call-arg]


@cache
def _components(method: Method, phase: int, spec: TensorSpec) -> int:
    """The least for the state's whole numbers with which the method sends what it says where they are not known."""
    state = _state(method, spec, 1)
    counts = [array for array in state.values() if array.dtype.kind in "iu"]
    expected = _num_bytes(method, phase, 2, spec)
    for whole in range(1, spec.size + 1 if counts else 1):
        for count in counts:
            count[:] = whole
        if _num_bytes(method, phase, 2, spec, state) == expected:
            return whole
    return 1
