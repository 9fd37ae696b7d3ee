"""Horovod's asynchronous collectives on torch tensors, as the engine asks for them."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import horovod.torch as hvd
import numpy as np
import torch

from hvdcompress.engine.transport import Request
from hvdcompress.method import Array

PAUSE = 1e-4  #: seconds between two looks at what has come; Horovod's own are as far apart


class Handle(NamedTuple):
    """Horovod's handle of a collective, and whether its result is wanted as a numpy array."""

    number: int
    numpy: bool


class HorovodTransport:
    """Collectives over one process set, by name.

    Horovod numbers unnamed collectives in each rank's own order: two ranks whose hooks fire in different order would
    exchange one tensor for another. Its broadcasts are neither fused nor cached, so the engine sends sums.

    Args:
        prefix: what all names begin with.
        process_set: the Horovod process set.
    """

    ordered = False
    native_broadcast = False
    variable_lengths = True

    def __init__(self, prefix: str, process_set: Any):
        self.prefix = prefix
        self.set = process_set
        self.rank, self.world = process_set.rank(), process_set.size()

    def start(self, name: str, request: Request) -> Handle:
        """Start a collective; returns at once."""
        is_numpy = not isinstance(request.payload, torch.Tensor)
        payload = torch.from_numpy(np.ascontiguousarray(request.payload)) if is_numpy else request.payload
        full: dict[str, Any] = {"name": f"{self.prefix}.{name}", "process_set": self.set}
        if request.kind == "all_reduce":
            reduce = hvd.allreduce_async_ if request.may_overwrite else hvd.allreduce_async
            number = reduce(payload, op=hvd.Sum if request.op == "sum" else hvd.Max, **full)
        elif request.kind == "all_gather":
            number = hvd.allgather_async(payload, **full)
        else:
            number = hvd.alltoall_async(payload, splits=torch.tensor(request.send_lengths, dtype=torch.int32), **full)
        return Handle(number, is_numpy)

    def ready(self, handle: Handle) -> bool:
        """Whether :meth:`wait` would return at once."""
        return hvd.poll(handle.number)

    def wait(self, handle: Handle) -> Array:
        """The result.

        Raises:
            HorovodInternalError: a peer is gone.
        """
        out = hvd.synchronize(handle.number)
        out = out[0] if isinstance(out, tuple) else out  # an all-to-all's pieces, and their lengths
        return out.numpy() if handle.numpy else out

    def idle(self, handle: Handle) -> None:
        """Let Horovod go on for a moment."""
        time.sleep(PAUSE)
