"""One call that wraps an optimizer in Horovod's, with compression."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import horovod.torch as hvd
import torch

from hvdcompress._torch.optimizers import plan_for
from hvdcompress.horovod.torch.compressor import Compressor
from hvdcompress.method import Method
from hvdcompress.plan import Plan


def attach(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
    method: str | Method | Plan | Mapping[str, Any] = "auto",
    *,
    op: Any = hvd.Average,
    backward_passes_per_step: int = 1,
    process_set: Any = hvd.global_process_set,
    loss_scale: float | Callable[[], float] = 1.0,
    ops: str = "auto",
    **settings: Any,
) -> torch.optim.Optimizer:
    """Wrap an optimizer in ``hvd.DistributedOptimizer``, with compression.

    Args:
        optimizer: of PyTorch.
        named_parameters: ``model.named_parameters()``.
        method: a method id with hyper-parameters in ``settings``, a Method, a Plan, or a plan's dict. "auto" is
            low-rank compression (ACP-SGD), or top-k if ``optimizer`` is Adam or a relative, whose beta1 it sets to 0;
            it is given up if the first steps show that it does not save time.
        op: ``hvd.Average`` or ``hvd.Sum``.
        backward_passes_per_step: gradients of so many batches are added on each rank before they are exchanged.
        process_set: the Horovod process set to reduce over.
        loss_scale: a number, or a function such as ``scaler.get_scale``, by which the loss was multiplied.
        ops: as for :class:`Compressor`.
        settings: hyper-parameters and plan keys.

    Returns:
        Horovod's optimizer; its attribute ``compressor`` is the :class:`Compressor`.

    Raises:
        ValueError: the plan is wrong, or ``hvd.init()`` was not called.
    """
    named = list(named_parameters)
    if not hvd.is_initialized():
        raise ValueError("call hvd.init() before attach()")
    plan = plan_for(optimizer, process_set.rank(), method, **settings)
    compressor = Compressor(plan, named, process_set=process_set, loss_scale=loss_scale, ops=ops)
    wrapped = hvd.DistributedOptimizer(
        optimizer,
        named,
        compression=compressor,
        op=op,
        backward_passes_per_step=backward_passes_per_step,
        process_set=process_set,
    )
    compressor.use_optimizer(wrapped)
    wrapped.compressor = compressor
    return wrapped
