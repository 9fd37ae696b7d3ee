"""Collectives among ranks that live in one process: every rank's request -> every rank's result.

Rehearsals and loopback use it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import hvdcompress.ops
from hvdcompress.engine.collectives import cut
from hvdcompress.engine.transport import Request

Results = list[Any]


def carry_out(requests: Sequence[Request]) -> Results:
    """The results of one collective; numpy arrays, which ranks may share.

    Raises:
        RuntimeError: the ranks ask for different collectives, or for one that cannot be.
    """
    kinds = {request.kind for request in requests}
    if len(kinds) != 1:
        raise RuntimeError(f"ranks ask for different collectives in one round: {', '.join(sorted(kinds))}")
    return RUN[kinds.pop()](requests)


def _all_reduce(requests: Sequence[Request]) -> Results:
    arrays = [request.payload for request in requests]
    lengths = {len(x) for x in arrays}
    if len(lengths) != 1:
        raise RuntimeError(f"an all-reduce of different lengths: {sorted(lengths)}")
    kinds = {f"{request.op} {request.payload.dtype}" for request in requests}
    if len(kinds) != 1:
        raise RuntimeError(f"an all-reduce of different kinds: {sorted(kinds)}")
    total = hvdcompress.ops.fast.add_all(arrays) if requests[0].op == "sum" else np.maximum.reduce(arrays)
    return [total] * len(requests)


def _all_gather(requests: Sequence[Request]) -> Results:
    return [np.concatenate([request.payload for request in requests])] * len(requests)


def _broadcast(requests: Sequence[Request]) -> Results:
    roots = {request.root for request in requests}
    if len(roots) != 1:
        raise RuntimeError(f"ranks disagree on the root of a broadcast: {sorted(map(str, roots))}")
    made = requests[roots.pop() or 0].payload
    (announced,) = requests[0].send_lengths or (0,)
    if len(made) != announced or len(made) % 4:
        raise RuntimeError(f"a broadcast of {len(made)} bytes was announced as {announced}")
    return [made] * len(requests)


def _all_to_all(requests: Sequence[Request]) -> Results:
    pieces = [cut(request.payload, request.send_lengths or ()) for request in requests]
    received = []
    for rank, request in enumerate(requests):
        mine = [row[rank] for row in pieces]
        lengths = tuple(map(len, mine))
        if lengths != request.recv_lengths:
            raise RuntimeError(
                f"an all-to-all brought rank {rank} {lengths} bytes, expected were {request.recv_lengths}"
            )
        received.append(np.concatenate(mine))
    return received


RUN: dict[str, Callable[[Sequence[Request]], Results]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "broadcast": _broadcast,
    "all_to_all": _all_to_all,
}
