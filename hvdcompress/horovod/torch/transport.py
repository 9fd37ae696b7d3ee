"""The engine's transport over Horovod: asynchronous collectives on torch tensors, matched by name."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import horovod.torch as hvd
import numpy as np
import torch
from horovod.torch.mpi_ops import _basics

from hvdcompress.engine.nodes import Nodes
from hvdcompress.engine.transport import Request
from hvdcompress.method import Array

POLL_INTERVAL = 5e-4  #: seconds between two polls; Horovod completes collectives once per ms by default


def _process_set(ranks: Iterable[int]) -> Any:
    """Return the process set of these ranks, and make it if the program has none; collective."""
    process_set = hvd.ProcessSet(list(ranks))
    # Horovod refuses a second process set of the same ranks
    for number, there in _basics._get_process_set_ids_and_ranks().items():
        if sorted(there) == sorted(process_set.ranks):
            process_set.process_set_id = number
            return process_set
    return hvd.add_process_set(process_set)


class Handle(NamedTuple):
    """A collective in flight.

    Attributes:
        number: Horovod's handle.
        numpy: whether the engine expects the result as a numpy array.
    """

    number: int
    numpy: bool


class HorovodTransport:
    """Collectives over one process set, with names.

    The names are necessary: Horovod numbers unnamed collectives in the order of each rank, so two ranks whose hooks
    fire in different orders would reduce one tensor with another. Horovod neither caches nor fuses broadcasts, so the
    engine sends sums instead (``broadcasts`` is False).

    Args:
        prefix: the prefix of all names; it must be unique to a Compressor.
        process_set: the Horovod process set.
    """

    ordered = False
    native_broadcast = False
    variable_lengths = True
    shards_sums: tuple[str, ...] = ()

    def __init__(self, prefix: str, process_set: Any):
        self.prefix = prefix
        self.set = process_set
        self.rank = process_set.rank()
        self.world_size = process_set.size()

    def split(self, nodes: Nodes) -> tuple[HorovodTransport, HorovodTransport, HorovodTransport]:
        """Return transports to the owners of a node, between nodes, and from the owners of a node; collective.

        Args:
            nodes: the nodes.
        """
        ranks = self.set.ranks
        # Every rank has to add every process set, in the same order
        inside = [_process_set(ranks[rank] for rank in nodes.ranks_of_node(node)) for node in range(nodes.num_nodes)]
        between = [_process_set(ranks[rank] for rank in nodes.counterparts(each)) for each in range(nodes.local_size)]
        own = inside[nodes.node_of(self.rank)]
        return (
            HorovodTransport(f"{self.prefix}.to_owner", own),
            HorovodTransport(f"{self.prefix}.between", between[nodes.local_rank(self.rank)]),
            HorovodTransport(f"{self.prefix}.from_owner", own),
        )

    def start(self, name: str, request: Request) -> Handle:
        """Start a collective; return without waiting for it."""
        is_numpy = not isinstance(request.payload, torch.Tensor)
        payload = torch.from_numpy(np.ascontiguousarray(request.payload)) if is_numpy else request.payload
        full: dict[str, Any] = {"name": f"{self.prefix}.{name}", "process_set": self.set}
        if request.kind == "all_reduce":
            reduce = hvd.allreduce_async_ if request.may_overwrite else hvd.allreduce_async
            number = reduce(payload, op=hvd.Sum if request.op == "sum" else hvd.Max, **full)
        elif request.kind == "all_gather":
            number = hvd.allgather_async(payload, **full)
        else:
            splits = torch.tensor(request.send_lengths, dtype=torch.int32, device="cpu")
            number = hvd.alltoall_async(payload, splits=splits, **full)
        return Handle(number, is_numpy)

    def ready(self, handle: Handle) -> bool:
        """Return whether the result is available (:meth:`wait` would not block)."""
        return hvd.poll(handle.number)

    def wait(self, handle: Handle) -> Array:
        """Wait for a collective and return its result, a flat array.

        Raises:
            HorovodInternalError: another rank is gone.
        """
        out = hvd.synchronize(handle.number)
        out = out[0] if isinstance(out, tuple) else out  # an all-to-all returns (pieces, their lengths)
        return out.numpy() if handle.numpy else out

    def idle(self, handle: Handle) -> None:
        """Sleep for one poll interval, so that Horovod's background thread gets the CPU."""
        time.sleep(POLL_INTERVAL)
