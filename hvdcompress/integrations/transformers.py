"""Hugging Face Transformers: callbacks that make a ``Trainer`` compress its gradients, or take local steps.

    from hvdcompress.integrations.transformers import CompressionCallback

    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.add_callback(CompressionCallback(trainer, "scalecom", density=0.01))
    trainer.train()

Each checkpoint gets a folder ``hvdcompress`` with the residuals, one file per rank. ``train(resume_from_checkpoint=…)``
restores them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

from torch.nn.parallel import DistributedDataParallel

from hvdcompress import ddp
from hvdcompress.integrations import rank_files
from hvdcompress.local_steps import LocalSteps
from hvdcompress.method import Method
from hvdcompress.plan import Plan
from hvdcompress.settings import DriverSettings

try:
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    raise ImportError("hvdcompress.integrations.transformers: pip install hvdcompress[transformers]") from error

__all__ = ["CompressionCallback", "LocalStepsCallback"]


class CompressionCallback(TrainerCallback):
    """Attach a Compressor to the ``DistributedDataParallel`` module when training begins; save and restore residuals.

    Args:
        trainer: the Trainer to which the callback is added. It is needed because Transformers does not pass the wrapped
            model to callbacks.
        method: a method id with hyper-parameters in ``settings``, a Method, a Plan, a plan's dict or YAML file.
        resume_from: the path of the checkpoint from which training resumes, if it is not ``checkpoint-STEP`` in the
            Trainer's ``output_dir``. Transformers does not pass this path to callbacks, either.
        settings: as for :func:`hvdcompress.ddp.attach`. With ``fp16=True``, ``loss_scale`` is taken from the Trainer's
            scaler.

    Attributes:
        compressor: the Compressor; None before training.
    """

    def __init__(
        self,
        trainer: Trainer,
        method: str | Method | Plan | Mapping[str, Any] = "auto",
        *,
        resume_from: str | Path | None = None,
        **settings: Unpack[DriverSettings],
    ):
        self.trainer = trainer
        self.method = method
        self.settings = settings
        self.resume_from = resume_from
        self.compressor: ddp.Compressor | None = None
        self._model: Any = None  # the model to which the Compressor is attached

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Attach a Compressor, unless an earlier ``train()`` has done so; restore residuals if training resumes.

        Raises:
            ValueError: there is only one process; the Trainer does not use DistributedDataParallel; the plan is wrong.
            FileNotFoundError: the residuals of some ranks are missing.
        """
        model = self.trainer.model_wrapped
        if self.compressor is None or self._model is not model:
            _refuse_one_process(args)
            scaler = self.trainer.accelerator.scaler
            scale = {"loss_scale": scaler.get_scale} if scaler else {}
            self.compressor = ddp.attach(model, self.method, **{**scale, **self.settings})
            self._model = model
        if state.global_step:
            rank_files.load(self.compressor, _folder(self.resume_from or _checkpoint(args, state)))

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Write this rank's residuals into the checkpoint, unless it contains only the model."""
        if self.compressor and not args.save_only_model:
            self.compressor.save(_folder(_checkpoint(args, state)))


class LocalStepsCallback(TrainerCallback):
    """Each rank trains alone, and the ranks exchange their parameters every few steps of the optimizer.

    The Trainer's ``DistributedDataParallel`` module stays, but exchanges nothing. Parameters are also exchanged before
    an evaluation, before a checkpoint and at the end. The state of each rank is saved into the checkpoints.

    Args:
        trainer: the Trainer to which the callback is added.
        every: steps from one exchange to the next.
        resume_from: as for :class:`CompressionCallback`.
        settings: further arguments of :class:`hvdcompress.local_steps.LocalSteps`, other than ``checkpoint``.

    Attributes:
        local: the LocalSteps; None before training.
    """

    def __init__(self, trainer: Trainer, every: int, *, resume_from: str | Path | None = None, **settings: Any):
        self.trainer = trainer
        self.every = every
        self.settings = settings
        self.resume_from = resume_from
        self.local: LocalSteps | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Make LocalSteps; restore the state if training resumes.

        Raises:
            ValueError: there is only one process; the Trainer does not use DistributedDataParallel; an argument is out
                of range.
            FileNotFoundError: the states of some ranks are missing.
        """
        trainer = self.trainer
        _refuse_one_process(args)
        if not isinstance(trainer.model_wrapped, DistributedDataParallel):
            raise ValueError("local steps need a Trainer that uses DistributedDataParallel, not FSDP or DeepSpeed")
        # As within no_sync(): neither gradients nor buffers are exchanged
        trainer.model_wrapped.require_backward_grad_sync = False
        if self.local is None or self.local.optimizer is not trainer.optimizer:
            if self.local:
                self.local.close()
            model = trainer.model_wrapped.module
            self.local = LocalSteps(model, trainer.optimizer, every=self.every, **self.settings)
        if state.global_step:
            rank_files.load(self.local, _folder(self.resume_from or _checkpoint(args, state)))

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Exchange parameters if they are due, or needed now."""
        assert self.local
        self.local.step()
        self._synchronize(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Exchange parameters if they are needed now."""
        self._synchronize(control)

    def _synchronize(self, control: Any) -> None:
        if self.local and (control.should_evaluate or control.should_save or control.should_training_stop):
            self.local.synchronize()

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Write this rank's state into the checkpoint, unless it contains only the model."""
        if self.local and not args.save_only_model:
            self.local.save(_folder(_checkpoint(args, state)))


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
