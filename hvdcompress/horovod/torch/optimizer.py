"""Wrap an optimizer in ``hvd.DistributedOptimizer`` with a Compressor, in one call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Unpack

import horovod.torch as hvd
import torch

from hvdcompress.horovod.torch.compressor import Compressor
from hvdcompress.method import Method
from hvdcompress.plan import Plan
from hvdcompress.settings import DriverSettings


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
    method: str | Method | Plan | Mapping[str, Any] = "auto",
    *,
    op: Any = hvd.Average,
    backward_passes_per_step: int = 1,
    process_set: Any = hvd.global_process_set,
    **settings: Unpack[DriverSettings],
) -> torch.optim.Optimizer:
    """Wrap an optimizer in ``hvd.DistributedOptimizer``, and compress the gradients that it exchanges.

    Args:
        optimizer: a PyTorch optimizer.
        named_parameters: ``model.named_parameters()``.
        method: a method id with hyper-parameters in ``settings``, a Method, a Plan, a plan's dict or YAML file. "auto"
            is top-k of 1 % in 4 bits. It falls back to uncompressed all-reduces if the first steps show that
            compression does not save time.
        op: ``hvd.Average`` or ``hvd.Sum``.
        backward_passes_per_step: number of backward passes whose gradients each rank adds before they are exchanged.
        process_set: the Horovod process set to reduce over.
        settings: ``loss_scale``, ``backend``, hyper-parameters and plan keys; see :class:`Compressor`.

    Returns:
        Horovod's optimizer, with the :class:`Compressor` as attribute ``compressor``.

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
    wrapped.compressor = compressor
    return wrapped
