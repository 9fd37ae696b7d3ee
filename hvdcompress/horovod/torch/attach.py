"""One call that wraps an optimizer in Horovod's, with compression."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import horovod.torch as hvd
import torch

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
    **settings: Any,
) -> torch.optim.Optimizer:
    """Wrap an optimizer in ``hvd.DistributedOptimizer``, with compression.

    Args:
        optimizer: of PyTorch.
        named_parameters: ``model.named_parameters()``.
        method: a method id with hyper-parameters in ``settings``, a Method, a Plan, or a plan's dict. "auto" is
            top-k of 1 % in 4 bits, which is given up if the first steps show that it does not save time. It sets beta1
            of Adam and its relatives to 0.
        op: ``hvd.Average`` or ``hvd.Sum``.
        backward_passes_per_step: gradients of so many batches are added on each rank before they are exchanged.
        process_set: the Horovod process set to reduce over.
        settings: ``loss_scale``, ``ops``, hyper-parameters and plan keys; see :class:`Compressor`.

    Returns:
        Horovod's optimizer; its attribute ``compressor`` is the :class:`Compressor`.

    Raises:
        ValueError: the plan is wrong, or ``hvd.init()`` was not called.
    """
    named = list(named_parameters)
    compressor = Compressor(method, named, process_set=process_set, **settings)
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
