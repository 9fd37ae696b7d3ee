"""Ranks that live in one process, in lockstep: their collectives, and rehearsals of methods.

:func:`carry_out` maps the requests of all ranks to the results of all ranks, as NumPy arrays; :func:`to_numpy`
converts arrays of other libraries. :func:`perform` does the same for the collectives of methods.

A *rehearsal* finds out which collectives a method uses in a phase, by running it on a small tensor of zeros. Within a
phase the number, kinds and dtypes of the collectives are fixed; the conformance suite checks this. Drivers that must
know them in advance, such as TensorFlow with its graphs, run one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np

import hvdcompress.ops
from hvdcompress.engine.collectives import cut, has_headers, lift, lower, received_lengths
from hvdcompress.engine.transport import Request
from hvdcompress.method import (
    Array,
    Broadcast,
    Collective,
    Communication,
    Context,
    Method,
    TensorSpec,
    Workspace,
)
from hvdcompress.ops.vectors import dtype_name
from hvdcompress.parts import feedback

SMALL_SHAPES = ((64,), (16, 16), (4, 12, 2, 3), (8, 16, 3, 3))  #: of rehearsals, if the method supports one of them

# -- collectives -----------------------------------------------------------------------------------------------


def carry_out(requests: Sequence[Request]) -> list[Any]:
    """Perform one collective.

    Args:
        requests: the request of each rank, in rank order.

    Returns:
        The result of each rank, as NumPy arrays. Ranks may share one array.

    Raises:
        RuntimeError: the requests are of different kinds, or do not fit together.
    """
    kinds = {request.kind for request in requests}
    if len(kinds) != 1:
        raise RuntimeError(f"ranks start different collectives in the same round: {', '.join(sorted(kinds))}")
    return RUN[kinds.pop()](requests)


def _common(what: str, values: Iterable[Any]) -> Any:
    """Return the one value that all ranks have."""
    different = set(values)
    if len(different) != 1:
        raise RuntimeError(f"{what} differ between ranks: {sorted(different, key=str)}")
    return different.pop()


def _all_reduce(requests: Sequence[Request]) -> list[Any]:
    arrays = [request.payload for request in requests]
    _common("all-reduce: lengths", map(len, arrays))
    _common("all-reduce: ops or dtypes", [f"{request.op} {request.payload.dtype}" for request in requests])
    # add_all sums in rank order, so results are reproducible
    total = hvdcompress.ops.fast.add_all(arrays) if requests[0].op == "sum" else np.maximum.reduce(arrays)
    return [total] * len(requests)


def _all_gather(requests: Sequence[Request]) -> list[Any]:
    return [np.concatenate([request.payload for request in requests])] * len(requests)


def _broadcast(requests: Sequence[Request]) -> list[Any]:
    made = requests[_common("broadcast: roots", [request.root for request in requests])].payload
    (announced,) = requests[0].send_lengths or (0,)
    if len(made) != announced or len(made) % 4:
        raise RuntimeError(f"broadcast: the root sends {len(made)} bytes, num_bytes is {announced} (a multiple of 4)")
    return [made] * len(requests)


def _all_to_all(requests: Sequence[Request]) -> list[Any]:
    pieces = [cut(request.payload, request.send_lengths or ()) for request in requests]
    received = []
    for rank, request in enumerate(requests):
        mine = [row[rank] for row in pieces]
        lengths = tuple(map(len, mine))
        if request.recv_lengths is not None and lengths != request.recv_lengths:
            raise RuntimeError(f"all-to-all: rank {rank} receives {lengths} bytes, expected {request.recv_lengths}")
        received.append(np.concatenate(mine))
    return received


RUN: dict[str, Callable[[Sequence[Request]], list[Any]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "broadcast": _broadcast,
    "all_to_all": _all_to_all,
}


def to_numpy(array: Array | None) -> Any:
    """Return an array of any library, in host memory, as a numpy array that shares its memory; None stays None."""
    return None if array is None else np.asarray(array)


def perform(collectives: list[Collective]) -> list[Array]:
    """Perform one collective of all ranks in this process.

    Args:
        collectives: the collective of each rank, in rank order.

    Returns:
        The result of each rank, in the form that methods expect.
    """
    world_size = len(collectives)
    fast = hvdcompress.ops.fast
    requests = [
        lower(collective, rank, world_size, fast, np.zeros(0), native_broadcast=True)
        for rank, collective in enumerate(collectives)
    ]
    outs = carry_out(requests)
    pieces = [request.recv_lengths or () for request in requests]
    # The requests of all-gathers have no lengths, because a method declares only its own
    pieces = [
        tuple(received_lengths(out, each, world_size, fast)) if has_headers(each) else lengths
        for out, each, lengths in zip(outs, collectives, pieces, strict=True)
    ]
    return [
        lift(collective, out, lengths, fast) for collective, out, lengths in zip(collectives, outs, pieces, strict=True)
    ]


# -- rehearsals ------------------------------------------------------------------------------------------------


class Round(NamedTuple):
    """Kind of one collective: class name, reduction of an all-reduce, and dtype of the payload."""

    collective: str
    op: str
    dtype: str


def round_of(collective: Collective) -> Round:
    """Return the kind of a collective."""
    dtype = "uint8" if isinstance(collective, Broadcast) else dtype_name(collective.x)
    return Round(type(collective).__name__, getattr(collective, "op", ""), dtype)


def rehearse(method: Method, phase: int, world_size: int, spec: TensorSpec) -> tuple[Round, ...]:
    """Return the collectives of ``method`` in ``phase`` for tensors like ``spec``, in order."""
    small = [TensorSpec(spec.name, shape, layout=spec.layout) for shape in SMALL_SHAPES]
    fitting = [each.shape for each in small if each.size < spec.size and method.suits(each)]
    sample = replace(anonymous(method, spec), shape=(*fitting, spec.shape)[0], members=())
    return tuple(round for round, _ in _rehearse(method, phase, world_size, sample))


def gathers(method: Method, spec: TensorSpec) -> bool:
    """Return whether ranks send each other payloads that the network does not add, in any phase of a method.

    A node's link then carries more, the more ranks the node has.
    """
    rounds = (round for phase in range(len(method.phases)) for round in rehearse(method, phase, 2, spec))
    return any(round.collective in ("AllGather", "AllToAll") for round in rounds)


def lengths(method: Method, phase: int, world_size: int, spec: TensorSpec) -> tuple[int, ...]:
    """Return the lengths of rank 0's payloads in these collectives: elements, or bytes for a broadcast.

    This is slow, because it runs the method on a tensor of full size.
    """
    return tuple(length for _, length in _rehearse(method, phase, world_size, anonymous(method, spec)))


def begin(method: Method, ctx: Context, x: Array, integers: int = 1) -> Communication:
    """Run the exchange of one rank for a gradient, with zero state, on the host.

    Args:
        method: the method.
        ctx: rank, world_size, phase and tensor.
        x: the gradient [n].
        integers: value of the integer slots, such as GradiVeQ's number of components.
    """
    spec = ctx.spec
    work = Workspace(hvdcompress.ops.fast)
    # full() instead of zeros(): it touches the memory, so that timings are those of a later step
    spare = {name: np.full(spec.size, 0.0, np.float32) for name in feedback.slot_names(method)}
    own = feedback.Feedback(method, blank_state(method, spec, integers), spare)
    if method.feedback != "none":
        spans = list(itertools.pairwise(itertools.accumulate(spec.parts, initial=0)))
        parts = [x[start:stop] for start, stop in spans]
        work.scanned = own.receive(parts, range(len(parts)), spans, ctx, work)
        x = spare[feedback.RESIDUAL]
    return (yield from own.exchange(x, ctx, work))


def context_of(method: Method, phase: int, rank: int, world_size: int, spec: TensorSpec) -> Context:
    """Return the context of a rank in a method's first step in ``phase``."""
    return Context(rank, world_size, 0, spec, phase=phase, needs_own=method.feedback != "none")


def blank_state(method: Method, spec: TensorSpec, integers: int = 1) -> dict[str, Array]:
    """Return a state of zeros whose integer slots are set to ``integers``."""
    state = {name: np.zeros(math.prod(slot.shape), slot.dtype) for name, slot in feedback.slots(method, spec).items()}
    for array in (each for each in state.values() if each.dtype.kind in "iu"):
        array[:] = integers
    return state


def anonymous(method: Method, spec: TensorSpec) -> TensorSpec:
    """Return a spec without tensors' names, on which collectives do not depend, so that results can be cached."""
    dtype = "float64" if method.keeps_float64 and spec.dtype == "float64" else "float32"
    members = tuple(anonymous(method, member) for member in spec.members)
    return TensorSpec("rehearsal", spec.shape, dtype, spec.layout, members)


@cache
def _rehearse(method: Method, phase: int, world_size: int, spec: TensorSpec) -> tuple[tuple[Round, int], ...]:
    x = np.zeros(spec.size, spec.dtype)
    ranks = [begin(method, context_of(method, phase, rank, world_size, spec), x) for rank in range(world_size)]
    rounds: list[tuple[Round, int]] = []
    try:
        collectives = [next(communication) for communication in ranks]
        while True:
            first = collectives[0]
            length = first.num_bytes if isinstance(first, Broadcast) else len(first.x)
            rounds.append((round_of(first), length))
            results = perform(collectives)
            collectives = [communication.send(result) for communication, result in zip(ranks, results, strict=True)]
    # All ranks finish in the same round, so the first one that returns ends the rehearsal
    except StopIteration:
        return tuple(rounds)
