"""Base of the Compressors over a process group of PyTorch: that of DDP and that of FSDP."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from hvdcompress._torch.compressor import TensorCompressor
from hvdcompress.ddp.transport import ProcessGroupTransport, meet
from hvdcompress.engine.levels import network_over
from hvdcompress.engine.nodes import Location
from hvdcompress.plan import IN_ORDER, Plan


class GroupCompressor(TensorCompressor):
    """Base of the Compressors over a process group. They have groups of their own, which the first step makes.

    Args:
        plan: the plan.
        parent: the process group of all ranks that exchange gradients.
        named_parameters, loss_scale, backend, location: as for :class:`TensorCompressor`.
    """

    _grouping = IN_ORDER

    def __init__(
        self,
        plan: Plan,
        parent: Any,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        loss_scale: float | Callable[[], float],
        backend: str,
        location: Location | None = None,
    ):
        super().__init__(
            plan, dist.get_rank(parent), dist.get_world_size(parent), named_parameters, loss_scale, backend, location
        )
        self._parent = parent
        self._transport: ProcessGroupTransport | None = None

    def close(self) -> None:
        """Free the Compressor's process group. Call it between steps."""
        if self._transport:
            self._transport.close()

    def _meet(self, device: torch.device, facts: Mapping[str, Any]) -> None:
        """Wait for all ranks and compare facts; see :func:`hvdcompress.ddp.transport.meet`."""
        meet(self._parent, device, self.watchdog, facts, "every rank's first backward pass")

    def _connect(self, device: torch.device) -> None:
        """Make the process groups, with all ranks, unless they are made already.

        Args:
            device: the device of the gradients.
        """
        if self._transport:
            return
        nodes = self.rank_state.nodes
        # Ranks with other nodes would wait for each other in different groups
        self._meet(device, {"nodes": str(nodes or "one level")})
        transport = ProcessGroupTransport(self._parent, device)
        self._network = network_over(transport, self.rank_state.observers, nodes)
        self._transport = transport
