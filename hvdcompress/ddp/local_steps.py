"""Local steps of a ``DistributedDataParallel`` module, which counts them; made by ``attach(model, local_steps=30)``.

DDP calls its communication hook for each bucket of each backward pass outside of ``no_sync()``, equally often on all
ranks, whatever their optimizers do. The hook returns the local gradients at once and counts the passes. The next
forward pass begins with the exchanges that are due, when the optimizer has used the gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from hvdcompress._torch.local_steps import ParameterExchange
from hvdcompress.ddp.compressor import Compressor
from hvdcompress.ddp.transport import peer_lost
from hvdcompress.engine.telemetry import log
from hvdcompress.plan import Plan


class TorchRanks:
    """torch.distributed: all ranks, unless a process group is given."""

    def __init__(self, group: Any):
        self._group = group or torch.distributed.group.WORLD
        self.rank = torch.distributed.get_rank(self._group)
        if self.rank < 0:
            raise ValueError("this rank is not in the process group")

    def compressor(self, plan: Plan, parameters: Mapping[str, torch.nn.Parameter]) -> Compressor:
        """Return a Compressor of these parameters."""
        return Compressor(plan, parameters.items(), process_group=self._group)

    def largest(self, data: torch.Tensor) -> torch.Tensor:
        """Return the maximum of a tensor of uint8 over all ranks, by element, in place; collective.

        Raises:
            PeerLost: the process group has failed.
        """
        try:
            torch.distributed.all_reduce(data, torch.distributed.ReduceOp.MAX, group=self._group)
        except RuntimeError as error:
            raise peer_lost(self.rank, error) from error
        return data


class CountedLocalSteps(ParameterExchange):
    """Local steps of a DDP module. There is no call of :meth:`step` in the program.

    Args:
        module: the DDP module. Its ``broadcast_buffers`` is turned off: buffers are averaged in each exchange.
        settings: arguments of :class:`~hvdcompress.local_steps.LocalSteps`.
    """

    def __init__(self, module: DistributedDataParallel, **settings: Any):
        super().__init__(module.module, process_group=module.process_group, **settings)
        self._is_saving = False
        self._changes_weights = False  # the program has changed the weights after the optimizer's last step
        module.broadcast_buffers = False
        costs = {
            "find_unused_parameters=True": module.find_unused_parameters and not module.static_graph,
            "SyncBatchNorm": any(isinstance(each, torch.nn.SyncBatchNorm) for each in module.modules()),
        }
        for option, found in costs.items():
            if found and self._ranks.rank == 0:
                log.warn_once(f"local steps: {option} communicates in every step; training is faster without it")

    def _ranks_of(self, driver: str | None, group: Any) -> TorchRanks:
        return TorchRanks(group)

    def _receive(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Communication hook: leave the gradients of a bucket as they are."""
        self._counted += bucket.is_last()
        buffer = bucket.buffer()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[buffer.device] if buffer.is_cuda else None
        )
        future.set_result(buffer)
        return future

    def _before_forward(self, module: torch.nn.Module) -> None:
        """Exchange what is due. An evaluation may run on one rank alone, so it exchanges nothing."""
        # A model in evaluation mode is trained if there are more backward passes since its last forward pass. After a
        # validation, Lightning 2.6 leaves the DDP module itself in evaluation mode
        is_trained = self.model.training or (self._counted > 1 and not self._own)
        if torch.is_grad_enabled() and is_trained:
            self._catch_up()
        elif not self.model.training:
            self._warn_between_exchanges("evaluated")

    def _catch_up(self) -> None:
        self._require_own_parameters()
        # Weights that are changed after every step, such as by clipping them, are trained. Others are loaded
        changed = self._versions != self._versions_now()
        if changed and not self._changes_weights:
            self._notice_changes()
        self._changes_weights = changed
        while self._counted:
            self._counted -= 1
            self.step()

    def _warn_between_exchanges(self, what: str) -> None:
        """Warn once if the parameters that the program uses are those of this rank alone."""
        agree = not self._counted and all(each.agreed == self.steps for each in self.fragments)
        if not (agree or self._own):
            log.warn_once(
                f"local steps: the model is {what} between two exchanges, when each rank has its own parameters; do it "
                "inside of `with compressor.synchronized():`, or after compressor.synchronize()"
            )

    def synchronize(self) -> None:
        """Count the steps so far, apply results of exchanges in flight, and exchange all parameters now.

        Call it on all ranks, at the end of training. Afterwards all ranks have the same parameters.
        """
        self._catch_up()
        super().synchronize()

    def close(self) -> None:
        """End the thread and free the process groups. Call it when training has ended."""
        self._warn_between_exchanges("left")
        super().close()

    def _state(self) -> dict[str, Any]:
        self._is_saving = True
        try:
            return super()._state()
        finally:
            self._is_saving = False

    def _before_state_dict(self, module: torch.nn.Module) -> None:
        """Hook of the model, before its state is taken."""
        if not self._is_saving:
            self._warn_between_exchanges("saved")

    def _add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError("LBFGS takes another number of backward passes on each rank, so steps cannot be counted")
        super()._add_optimizer(optimizer)
