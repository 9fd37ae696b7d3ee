"""Hugging Face accelerate: compress the gradients of a prepared model, and save residuals with its checkpoints.

    from hvdcompress.integrations.accelerate import attach

    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    attach(accelerator, model, "scalecom", density=0.01)

``accelerator.save_state(folder)`` then writes each rank's residuals to ``folder/hvdcompress``, and ``load_state`` reads
them. Do not use ``register_for_checkpointing``, which saves only the residuals of the main process.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hvdcompress import ddp
from hvdcompress.ddp.local_steps import CountedLocalSteps
from hvdcompress.integrations import attached, rank_files
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
    method: str | Method | Plan | Mapping[str, Any] = "auto",
    **settings: Any,
) -> ddp.Compressor | CountedLocalSteps:
    """Compress the gradients of a model that ``accelerator.prepare`` has returned.

    Call it on every process, before the first backward pass and before ``load_state``.

    Args:
        accelerator: the Accelerator that prepared the model.
        model: the prepared model.
        method: a method id with hyper-parameters in ``settings``, a Method, a Plan, a plan's dict or YAML file.
        settings: as for :func:`hvdcompress.ddp.attach`, including ``local_steps``. With
            ``mixed_precision="fp16"``, ``loss_scale`` is by default taken from accelerate's scaler.

    Returns:
        What :func:`hvdcompress.ddp.attach` returns.

    Raises:
        ValueError: there is only one process; accelerate has not wrapped the model in DistributedDataParallel; the
            model uses an option that compression does not support; the plan is wrong.
    """
    if accelerator.num_processes == 1:
        raise ValueError(
            "there is only one process, so there are no gradients to exchange: start the script with accelerate launch "
            "--num_processes 2"
        )
    if accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise ValueError(
            f"accelerate uses {accelerator.distributed_type.value}, not DistributedDataParallel; configure it for "
            "multi-GPU or multi-CPU training"
        )
    compressor = attached(model, method, accelerator.scaler, settings)

    def number_of(models: list[torch.nn.Module]) -> int:
        return next(number for number, each in enumerate(models) if any(each is inner for inner in model.modules()))

    def save(models: list[torch.nn.Module], weights: Any, folder: str) -> None:
        compressor.save(_folder(folder, number_of(models)))

    def load(models: list[torch.nn.Module], folder: str) -> None:
        number = number_of(models)
        rank_files.load(compressor, _folder(folder, number))
        if isinstance(compressor, CountedLocalSteps) and compressor.steps:
            models[number] = copy.deepcopy(models[number])  # accelerate loads the weights of the main process into it

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    return compressor


def _folder(folder: str, number: int) -> Path:
    """Return the folder for a model's residuals within a checkpoint.

    It is ``hvdcompress`` for the first prepared model, ``hvdcompress_1`` for the second, and so on: accelerate numbers
    its own files in the same way.
    """
    return Path(folder) / (f"{rank_files.NAME}_{number}" if number else rank_files.NAME)
