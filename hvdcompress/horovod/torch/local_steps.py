"""The network of local steps over Horovod."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import horovod.torch as hvd
import torch

from hvdcompress.horovod.torch.compressor import Compressor
from hvdcompress.plan import Plan


class HorovodRanks:
    """Horovod: all ranks, unless a process set is given."""

    def __init__(self, process_set: Any):
        if not hvd.is_initialized():
            raise ValueError("call torch.distributed.init_process_group() or hvd.init() before making LocalSteps")
        self._set = process_set or hvd.global_process_set
        self.rank = self._set.rank()

    def compressor(self, plan: Plan, parameters: Mapping[str, torch.nn.Parameter]) -> Compressor:
        """Return a Compressor of these parameters."""
        return Compressor(plan, parameters.items(), process_set=self._set)

    def largest(self, data: torch.Tensor) -> torch.Tensor:
        """Return the maximum of a tensor of uint8 over all ranks, by element; collective.

        Raises:
            HorovodInternalError: a rank is gone.
        """
        # Horovod cannot reduce bytes
        return hvd.allreduce(data.int(), op=hvd.Max, name="hvdcompress.local_steps", process_set=self._set).byte()
