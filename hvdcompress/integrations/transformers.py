"""Hugging Face Transformers: a callback that makes a ``Trainer`` compress its gradients, or take local steps.

    from hvdcompress.integrations.transformers import CompressionCallback

    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.add_callback(CompressionCallback(trainer, "scalecom", density=0.01))
    trainer.train()

Each checkpoint gets a folder ``hvdcompress`` with the residuals, one file per rank. ``train(resume_from_checkpoint=…)``
restores them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdcompress import ddp
from hvdcompress.ddp.local_steps import CountedLocalSteps
from hvdcompress.integrations import attached, rank_files
from hvdcompress.method import Method
from hvdcompress.plan import Plan

try:
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    raise ImportError("hvdcompress.integrations.transformers: pip install hvdcompress[transformers]") from error

__all__ = ["CompressionCallback"]


class CompressionCallback(TrainerCallback):
    """Attach a Compressor to the ``DistributedDataParallel`` module when training begins; save and restore its state.

    With ``local_steps``, evaluations and checkpoints use the parameters of the last exchange, and parameters are
    exchanged at the end.

    Args:
        trainer: the Trainer to which the callback is added. It is needed because Transformers does not pass the wrapped
            model to callbacks.
        method: a method id with hyper-parameters in ``settings``, a Method, a Plan, a plan's dict or YAML file.
        resume_from: the path of the checkpoint from which training resumes, if it is not ``checkpoint-STEP`` in the
            Trainer's ``output_dir``. Transformers does not pass this path to callbacks, either.
        settings: as for :func:`hvdcompress.ddp.attach`, including ``local_steps``. With ``fp16=True``, ``loss_scale``
            is taken from the Trainer's scaler.

    Attributes:
        compressor: what :func:`hvdcompress.ddp.attach` returned; None before training.
    """

    def __init__(
        self,
        trainer: Trainer,
        method: str | Method | Plan | Mapping[str, Any] = "auto",
        *,
        resume_from: str | Path | None = None,
        **settings: Any,
    ):
        self.trainer = trainer
        self.method = method
        self.settings = settings
        self.resume_from = resume_from
        self.compressor: ddp.Compressor | CountedLocalSteps | None = None
        self._model: Any = None  # the model to which the Compressor is attached
        self._evaluation = contextlib.ExitStack()

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Attach a Compressor, unless an earlier ``train()`` has done so; restore residuals if training resumes.

        Raises:
            ValueError: there is only one process; the Trainer does not use DistributedDataParallel; the plan is wrong.
            FileNotFoundError: the residuals of some ranks are missing.
        """
        model = self.trainer.model_wrapped
        if self.compressor is None or self._model is not model:
            _refuse_one_process(args)
            self.compressor = attached(model, self.method, self.trainer.accelerator.scaler, self.settings)
            self._model = model
        if state.global_step:
            rank_files.load(self.compressor, _folder(self.resume_from or _checkpoint(args, state)))

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Use the same parameters on all ranks, if the model is evaluated or saved now."""
        if isinstance(self.compressor, CountedLocalSteps):
            if control.should_training_stop:
                self.compressor.synchronize()
            elif control.should_evaluate or control.should_save:
                self._evaluation.enter_context(self.compressor.synchronized())

    on_epoch_end = on_step_end

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Return to the parameters of this rank."""
        self._evaluation.close()

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Write this rank's residuals into the checkpoint, unless it contains only the model."""
        if self.compressor and not args.save_only_model:
            self.compressor.save(_folder(_checkpoint(args, state)))


def _refuse_one_process(args: Any) -> None:
    if args.world_size == 1:
        raise ValueError(
            "there is only one process, so there is nothing to exchange: start the script with torchrun "
            "--nproc-per-node 2"
        )


def _checkpoint(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _folder(checkpoint: str | Path) -> Path:
    return Path(checkpoint) / rank_files.NAME
