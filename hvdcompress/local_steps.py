"""Local steps: each rank trains alone, and the ranks exchange their parameters every ``every`` steps, compressed.

    from hvdcompress.local_steps import LocalSteps

    local = LocalSteps(model, optimizer, every=30)          # on every rank; no DDP wrapper
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss_of(model(inputs), targets).backward()
        optimizer.step()
        local.step()                                        # exchanges in every 30th call

A DDP model needs one line instead: ``ddp.attach(model, local_steps=30)``.
"""

from __future__ import annotations

from typing import Any

import torch

from hvdcompress._torch.fragment import Fragment
from hvdcompress._torch.local_steps import OUTER, ParameterExchange, Ranks
from hvdcompress.ddp.local_steps import TorchRanks

__all__ = ["OUTER", "Fragment", "LocalSteps"]


class LocalSteps(ParameterExchange):
    """Exchanges the parameters of a model every few steps.

    Constructing it is collective: all ranks must do it. It broadcasts parameters and buffers from rank 0.

    Args:
        model: the model, not wrapped in ``DistributedDataParallel``. Its parameters that require a gradient are
            exchanged. Floating-point buffers, such as those of batch normalization, are averaged in each exchange.
        optimizer: the inner optimizer, whose state stays local, and is saved and loaded with the rest. Without it, the
            states of all optimizers that train the parameters are saved, and each is loaded in its first step, but not
            its learning rate and other hyper-parameters.
        every: steps from one exchange of a parameter to the next. "auto" is 30 if the outer optimizer has momentum.
            Otherwise it is from 10 to 30, as few as let exchanges take a tenth of the time of the steps. The first
            three exchanges, 10 steps apart, measure it.
        method: a method id with hyper-parameters in ``settings``, a Method, a Plan, a plan's dict or YAML file. "auto"
            is QSGD. The momentum of the outer optimizer is kept, unless a rule or ``settings`` have
            ``optimizer_momentum``.
        outer: ``lr``, ``momentum`` and ``nesterov`` of the outer SGD; None to average the parameters. "auto" is
            (0.7, 0.9, True), as in DiLoCo's paper, if SGD trains the model, and None with other optimizers.
        fragments: number of parts of the model. One of them is exchanged every ``every / fragments`` steps.
        delay: steps from the beginning of an exchange to the use of its result. During these steps, training goes on.
        mixing: share of a rank's own parameters when a result is applied (α in Streaming DiLoCo).
        warmup: number of first steps after which parameters are averaged in every step, uncompressed.
        driver: "torch" for torch.distributed or "horovod"; by default the one that is initialized.
        process_group: a torch.distributed process group or a Horovod process set; by default all ranks.
        checkpoint: a folder that all ranks see. The state is loaded from there if there is one, and saved after each
            exchange; during the warm-up, every ``every`` steps.
        settings: hyper-parameters and plan keys (``min_elements``, ``seed``, ``nodes``, …).

    Attributes:
        steps: number of calls of :meth:`step`.
        outer: the outer optimizer.
        fragments: the parts of the model. The last one has the buffers, if there are any.

    Raises:
        ValueError: an argument is out of range, the plan is wrong, or neither torch.distributed nor Horovod is
            initialized.
    """

    def _ranks_of(self, driver: str | None, group: Any) -> Ranks:
        if driver not in (None, "torch", "horovod"):
            raise ValueError(f'driver = {driver!r} must be "torch" or "horovod"')
        has_torch = torch.distributed.is_available() and torch.distributed.is_initialized()
        if driver == "torch" or (has_torch and not driver):
            return TorchRanks(group)
        from hvdcompress.horovod.torch.local_steps import HorovodRanks

        return HorovodRanks(group)
