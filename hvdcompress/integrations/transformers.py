"""Hugging Face Transformers: a callback by which a ``Trainer`` compresses what its model exchanges.

    from hvdcompress.integrations.transformers import CompressionCallback

    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.add_callback(CompressionCallback(trainer, "scalecom", density=0.01))
    trainer.train()

Each checkpoint gets a folder ``hvdcompress`` with a file per rank; ``train(resume_from_checkpoint=…)`` restores them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdcompress import ddp
from hvdcompress.integrations import beside
from hvdcompress.method import Method
from hvdcompress.plan import Plan

try:
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    raise ImportError("hvdcompress.integrations.transformers: pip install hvdcompress[transformers]") from error

__all__ = ["CompressionCallback"]


class CompressionCallback(TrainerCallback):
    """Attaches to the ``DistributedDataParallel`` module when training begins; saves and restores residuals.

    Args:
        trainer: the Trainer that it is added to: callbacks are not shown the wrapped model.
        method: a method id with hyper-parameters in ``settings``, a Method, a Plan, or a plan's dict.
        resume_from: the checkpoint that training goes on from. Without it, ``checkpoint-STEP`` in the Trainer's
            ``output_dir`` is meant: callbacks are not shown that, either.
        settings: as for :func:`hvdcompress.ddp.attach`. With ``fp16=True``, ``loss_scale`` is the scaler's.

    Attributes:
        compressor: the Compressor; None before training.
    """

    def __init__(
        self,
        trainer: Trainer,
        method: str | Method | Plan | Mapping[str, Any],
        *,
        resume_from: str | Path | None = None,
        **settings: Any,
    ):
        self.trainer, self.method, self.settings, self.resume_from = trainer, method, settings, resume_from
        self.compressor: ddp.Compressor | None = None
        self._model: Any = None  # that the Compressor is attached to

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Attach, unless an earlier ``train()`` has; go on from the checkpoint's residuals.

        Raises:
            ValueError: there is one process, or the Trainer does not use DistributedDataParallel; the plan is wrong.
            FileNotFoundError: the residuals of some ranks are missing.
        """
        model = self.trainer.model_wrapped
        if self.compressor is None or self._model is not model:
            if args.world_size == 1:
                raise ValueError("there is one process, so there is nothing to compress: torchrun --nproc-per-node 2 …")
            scaler = self.trainer.accelerator.scaler
            scale = {"loss_scale": scaler.get_scale} if scaler else {}
            self.compressor, self._model = ddp.attach(model, self.method, **{**scale, **self.settings}), model
        if state.global_step:
            beside.load(self.compressor, _folder(self.resume_from or _checkpoint(args, state)))

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Write this rank's residuals into the checkpoint, unless it has the model alone."""
        if self.compressor and not args.save_only_model:
            beside.save(self.compressor, _folder(_checkpoint(args, state)))


def _checkpoint(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _folder(checkpoint: str | Path) -> Path:
    return Path(checkpoint) / beside.NAME
