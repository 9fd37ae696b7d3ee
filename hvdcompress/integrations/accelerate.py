"""Hugging Face accelerate: compress what a prepared model exchanges, and save it with accelerate's own checkpoints.

    from hvdcompress.integrations.accelerate import attach

    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    attach(accelerator, model, "scalecom", density=0.01)

``accelerator.save_state(folder)`` then writes each rank's residuals to ``folder/hvdcompress``, and ``load_state`` reads
them. (``register_for_checkpointing`` would save the main process's alone.)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hvdcompress import ddp
from hvdcompress.integrations import beside
from hvdcompress.method import Method
from hvdcompress.plan import Plan

try:
    from accelerate import Accelerator, DistributedType
except ImportError as error:
    raise ImportError("hvdcompress.integrations.accelerate: pip install hvdcompress[accelerate]") from error

__all__ = ["attach"]


def attach(
    accelerator: Accelerator,
    model: torch.nn.Module,
    method: str | Method | Plan | Mapping[str, Any],
    **settings: Any,
) -> ddp.Compressor:
    """Compress what a model exchanges that ``accelerator.prepare`` has returned.

    Call it on every process, before the first backward pass and before ``load_state``.

    Args:
        accelerator: the Accelerator that prepared it.
        model: what it returned.
        method: a method id with hyper-parameters in ``settings``, a Method, a Plan, or a plan's dict.
        settings: as for :func:`hvdcompress.ddp.attach`; with ``mixed_precision="fp16"``, ``loss_scale`` is the
            scaler's.

    Returns:
        The Compressor.

    Raises:
        ValueError: accelerate has not wrapped the model in DistributedDataParallel, or it has an option with which
            there is no compression; the plan is wrong.
    """
    if accelerator.num_processes == 1:
        raise ValueError("there is one process, so there is nothing to compress: accelerate launch --num_processes 2 …")
    if accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise ValueError(f"accelerate runs {accelerator.distributed_type.value}, not DistributedDataParallel")
    scale = {"loss_scale": accelerator.scaler.get_scale} if accelerator.scaler else {}
    compressor = ddp.attach(model, method, **{**scale, **settings})

    def save(models: list[torch.nn.Module], weights: Any, folder: str) -> None:
        beside.save(compressor, _place(folder, models, model))

    def load(models: list[torch.nn.Module], folder: str) -> None:
        beside.load(compressor, _place(folder, models, model))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    return compressor


def _place(folder: str, models: list[torch.nn.Module], model: torch.nn.Module) -> Path:
    """``hvdcompress`` for the first model that was prepared, ``hvdcompress_1`` for the second, as accelerate does."""
    number = next((number for number, one in enumerate(models) if one is model), 0)
    return Path(folder) / (f"{beside.NAME}_{number}" if number else beside.NAME)
