"""Which collectives a method asks for in a phase, found out by running it once on a small tensor.

Within a phase the number, verbs and dtypes of collectives are fixed (the conformance suite checks it), so a driver
that must lay them out beforehand, as TensorFlow's graphs want it, can learn them from a rehearsal: all ranks in
lockstep, on zeros, in a shape that the method suits.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import numpy as np

from hvdcompress.loopback import RUN
from hvdcompress.method import Array, Broadcast, Communication, Context, Method, TensorSpec, Verb
from hvdcompress.ops import fast
from hvdcompress.parts import feedback


class Round(NamedTuple):
    """One collective: the verb's name, the operation of an all-reduce, and the dtype that it carries."""

    verb: str
    op: str
    dtype: str


def round_of(verb: Verb) -> Round:
    """The round of a verb."""
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
    exchanges = [begin(method, phase, rank, world, spec, x, 1) for rank in range(world)]
    rounds: list[tuple[Round, int]] = []
    try:
        verbs = [next(exchange) for exchange in exchanges]
        while True:
            rounds.append((round_of(verbs[0]), _length(verbs[0])))
            results, _ = RUN[type(verbs[0])](verbs)
            verbs = [exchange.send(result) for exchange, result in zip(exchanges, results, strict=True)]
    except StopIteration:
        return tuple(rounds)


def begin(
    method: Method, phase: int, rank: int, world: int, spec: TensorSpec, x: Array, whole: int = 1
) -> Communication:
    """One rank's exchange of ``x`` [n] with a state of :func:`state_of`."""
    # full() and not zeros(): memory that is there, as in any step but the first
    spare = {name: np.full(spec.size, 0.0, np.float32) for name in feedback.names(method)}
    ctx = Context(rank, world, 0, spec, phase=phase)
    return feedback.exchange(method, x, 1.0, blank_state(method, spec, whole), spare, ctx, fast)


def blank_state(method: Method, spec: TensorSpec, whole: int = 1) -> dict[str, Array]:
    """A state of zeros, in which whole numbers (such as GradiVeQ's components) are ``whole``."""
    state = {name: np.zeros(math.prod(s.shape), s.dtype) for name, s in feedback.slots(method, spec).items()}
    for count in (array for array in state.values() if array.dtype.kind in "iu"):
        count[:] = whole
    return state


def _length(verb: Verb) -> int:
    return verb.num_bytes if isinstance(verb, Broadcast) else len(verb.x)
