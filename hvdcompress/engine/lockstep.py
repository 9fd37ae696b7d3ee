"""Collectives of ranks that live in one process: maps the requests of all ranks to the results of all ranks.

Collectives take and return NumPy arrays; :func:`to_numpy` and :func:`of_ops` convert arrays of other libraries.

Used by ``rehearsal.py`` and ``hvdcompress.loopback``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

import hvdcompress.ops
from hvdcompress.engine.collectives import cut
from hvdcompress.engine.transport import Request
from hvdcompress.method import Array
from hvdcompress.ops.spec import Ops

Results = list[Any]


def carry_out(requests: Sequence[Request]) -> Results:
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


def _all_reduce(requests: Sequence[Request]) -> Results:
    arrays = [request.payload for request in requests]
    _common("all-reduce: lengths", map(len, arrays))
    _common("all-reduce: ops or dtypes", [f"{request.op} {request.payload.dtype}" for request in requests])
    # add_all sums in rank order, so results are reproducible
    total = hvdcompress.ops.fast.add_all(arrays) if requests[0].op == "sum" else np.maximum.reduce(arrays)
    return [total] * len(requests)


def _all_gather(requests: Sequence[Request]) -> Results:
    return [np.concatenate([request.payload for request in requests])] * len(requests)


def _broadcast(requests: Sequence[Request]) -> Results:
    made = requests[_common("broadcast: roots", [request.root for request in requests])].payload
    (announced,) = requests[0].send_lengths or (0,)
    if len(made) != announced or len(made) % 4:
        raise RuntimeError(f"broadcast: the root sends {len(made)} bytes, num_bytes is {announced} (a multiple of 4)")
    return [made] * len(requests)


def _all_to_all(requests: Sequence[Request]) -> Results:
    pieces = [cut(request.payload, request.send_lengths or ()) for request in requests]
    received = []
    for rank, request in enumerate(requests):
        mine = [row[rank] for row in pieces]
        lengths = tuple(map(len, mine))
        if request.recv_lengths is not None and lengths != request.recv_lengths:
            raise RuntimeError(f"all-to-all: rank {rank} receives {lengths} bytes, expected {request.recv_lengths}")
        received.append(np.concatenate(mine))
    return received


RUN: dict[str, Callable[[Sequence[Request]], Results]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "broadcast": _broadcast,
    "all_to_all": _all_to_all,
}


def of_ops(ops: Ops, array: np.ndarray) -> Array:
    """Return a numpy array as an array of the ops' library. The two share memory unless ``array`` is read-only."""
    return ops.asarray(array, like=array)


def to_numpy(array: Array | None) -> Any:
    """Return an array of any library, in host memory, as a numpy array that shares its memory; None stays None."""
    return None if array is None else np.asarray(array)
