"""The two networks of local steps, torch.distributed and Horovod, with the collective that no Compressor has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hvdcompress._torch.compressor import TensorCompressor
from hvdcompress.plan import Plan


class TorchNetwork:
    """torch.distributed: all ranks, unless a process group is given."""

    def __init__(self, group: Any):
        self._group = group or torch.distributed.group.WORLD
        self.rank = torch.distributed.get_rank(self._group)
        if self.rank < 0:
            raise ValueError("this rank is not in the process group")

    def compressor(self, plan: Plan, parameters: Mapping[str, torch.nn.Parameter]) -> TensorCompressor:
        """Return a Compressor of these parameters."""
        from hvdcompress.ddp import Compressor

        return Compressor(plan, parameters.items(), process_group=self._group)

    def largest(self, data: torch.Tensor) -> torch.Tensor:
        """Return the maximum of a tensor of uint8 over all ranks, by element, in place; collective.

        Raises:
            PeerLost: the process group has failed.
        """
        from hvdcompress.ddp.transport import peer_lost

        try:
            torch.distributed.all_reduce(data, torch.distributed.ReduceOp.MAX, group=self._group)
        except RuntimeError as error:
            raise peer_lost(self.rank, error) from error
        return data


class HorovodNetwork:
    """Horovod: all ranks, unless a process set is given."""

    def __init__(self, process_set: Any):
        import horovod.torch as hvd

        if not hvd.is_initialized():
            raise ValueError("call torch.distributed.init_process_group() or hvd.init() before making LocalSteps")
        self._set = process_set or hvd.global_process_set
        self.rank = self._set.rank()

    def compressor(self, plan: Plan, parameters: Mapping[str, torch.nn.Parameter]) -> TensorCompressor:
        """Return a Compressor of these parameters."""
        from hvdcompress.horovod.torch import Compressor

        return Compressor(plan, parameters.items(), process_set=self._set)

    def largest(self, data: torch.Tensor) -> torch.Tensor:
        """Return the maximum of a tensor of uint8 over all ranks, by element; collective.

        Raises:
            HorovodInternalError: a rank is gone.
        """
        import horovod.torch as hvd

        # Horovod cannot reduce bytes
        return hvd.allreduce(data.int(), op=hvd.Max, name="hvdcompress.local_steps", process_set=self._set).byte()


Network = TorchNetwork | HorovodNetwork


def broadcast(network: Network, tensor: torch.Tensor) -> None:
    """Copy a tensor from rank 0 to all ranks, as bytes, because Horovod does not know every dtype."""
    data = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
    if network.rank:
        data.zero_()
    if len(data):
        tensor.detach().copy_(network.largest(data).view(tensor.dtype).view(tensor.shape))


def network_of(driver: str | None, group: Any) -> Network:
    """Return the network of a driver, "torch" or "horovod"; by default of the one that is initialized.

    Args:
        driver: the driver; None for the default.
        group: a torch.distributed process group or a Horovod process set; None for all ranks.

    Raises:
        ValueError: there is no such driver, neither is initialized, or this rank is not in the group.
    """
    if driver not in (None, "torch", "horovod"):
        raise ValueError(f'driver = {driver!r} must be "torch" or "horovod"')
    has_torch = torch.distributed.is_available() and torch.distributed.is_initialized()
    return HorovodNetwork(group) if driver == "horovod" or not (driver or has_torch) else TorchNetwork(group)
