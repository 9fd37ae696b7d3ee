"""Lightning: a strategy like ``DDPStrategy`` that compresses gradients, or takes local steps.

    from hvdcompress.integrations.lightning import CompressedDDP

    trainer = Trainer(strategy=CompressedDDP("scalecom", density=0.01), devices=2)
    trainer = Trainer(strategy="hvdcompress_scalecom", devices=2)  # by name, with the method's defaults
    trainer = Trainer(strategy=CompressedDDP(local_steps=30), devices=2)

Importing this module registers a strategy name for every method. Lightning's own ``ddp_comm_hook=`` is silently ignored
on devices other than CUDA, and Lightning does not save the state of a hook. This strategy also works on the CPU, and
saves the residuals.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from hvdcompress import ddp, registry
from hvdcompress.ddp.local_steps import CountedLocalSteps
from hvdcompress.integrations import attached, rank_files
from hvdcompress.method import Method
from hvdcompress.plan import Plan

try:
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
except ImportError as error:
    raise ImportError("hvdcompress.integrations.lightning: pip install hvdcompress[lightning]") from error

__all__ = ["CompressedDDP"]


class CompressedDDP(DDPStrategy):
    """Lightning's ``DDPStrategy`` with compressed gradients, or with local steps.

    The state of each rank is saved next to the checkpoint, in a folder with the name of the checkpoint and the suffix
    ``.hvdcompress`` instead of ``.ckpt``. ``Trainer.fit(ckpt_path=…)`` restores it together with the optimizers'
    state, and ``ModelCheckpoint`` removes it together with the checkpoint. It is not saved for a checkpoint that
    contains only weights.

    With ``local_steps``, validation and checkpoints use the parameters of the last exchange, and parameters are
    exchanged at the end.

    Args:
        method: a method id, a Method, a Plan, or a plan's dict.
        settings: settings of :func:`hvdcompress.ddp.attach`: ``local_steps``, hyper-parameters and plan keys; and
            options of ``DDPStrategy`` and ``DistributedDataParallel``. With ``precision="16-mixed"``, ``loss_scale`` is
            taken from Lightning's scaler.

    Attributes:
        compressor: what :func:`hvdcompress.ddp.attach` returned in the last ``fit``; None before the first one.
    """

    _checkpoint = ""  # path of the checkpoint that was loaded last

    def __init__(
        self,
        method: str | Method | Plan | Mapping[str, Any] = "auto",
        **settings: Any,
    ):
        super().__init__(**_options_of_ddp(settings))
        self.method = method
        self.settings = settings
        self.compressor: ddp.Compressor | CountedLocalSteps | None = None
        self._validation = contextlib.ExitStack()

    def configure_ddp(self) -> None:
        """Wrap the model in ``DistributedDataParallel``, and attach a Compressor or local steps.

        Raises:
            ValueError: the plan is wrong, or the model uses an option that compression does not support.
        """
        super().configure_ddp()
        if self.compressor:
            self.compressor.close()
        scaler = getattr(self.precision_plugin, "scaler", None)
        self.compressor = attached(self.model, self.method, scaler, self.settings)

    def _synchronized(self) -> contextlib.AbstractContextManager[None]:
        """Context manager for the parameters of the last exchange, if there are local steps."""
        if isinstance(self.compressor, CountedLocalSteps):
            return self.compressor.synchronized()
        return contextlib.nullcontext()

    def on_validation_start(self) -> None:
        """Validate the same model on all ranks."""
        self._validation.enter_context(self._synchronized())

    def on_validation_end(self) -> None:
        """Return to the parameters of this rank."""
        self._validation.close()

    def on_train_end(self) -> None:
        """Exchange parameters, so that all ranks end with the same model."""
        if isinstance(self.compressor, CountedLocalSteps):
            self.compressor.synchronize()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state of the model, which is the same on all ranks."""
        with self._synchronized():
            state = super().lightning_module_state_dict()
            return copy.deepcopy(state) if isinstance(self.compressor, CountedLocalSteps) else state

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Write the checkpoint on rank 0, and each rank's state on every rank.

        Raises:
            ValueError: the path is a URL, not a local path.
        """
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
        if "optimizer_states" in checkpoint and self.compressor:
            self.compressor.save(folder_of(filepath))

    def load_checkpoint(self, checkpoint_path: str | Path, *args: Any, **options: Any) -> dict[str, Any]:
        """Read the checkpoint, and remember its path for the state of the ranks."""
        self._checkpoint = str(checkpoint_path)
        return super().load_checkpoint(checkpoint_path, *args, **options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the state of the optimizers, and the state of this rank.

        Raises:
            FileNotFoundError: the states of some ranks are missing.
            ValueError: the states belong to another model, or the path is a URL.
        """
        super().load_optimizer_state_dict(checkpoint)
        if self.compressor:
            rank_files.load(self.compressor, folder_of(self._checkpoint))

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove the checkpoint and the states. If the path is a symbolic link, remove only the link."""
        # A URL has no states, and the states of a link belong to the checkpoint that it points to
        has_none = "://" in str(filepath) or Path(filepath).is_symlink()
        super().remove_checkpoint(filepath)
        if not has_none:
            rank_files.remove(folder_of(filepath))


def _options_of_ddp(settings: dict[str, Any]) -> dict[str, Any]:
    """Take the options of ``DDPStrategy`` and ``DistributedDataParallel`` out of ``settings``."""
    known = {**signature(DDPStrategy).parameters, **signature(DistributedDataParallel).parameters}
    return {name: settings.pop(name) for name in settings.keys() & known.keys()}


def folder_of(filepath: str | Path) -> Path:
    """Return the folder for the residuals of a checkpoint. Links, such as ``last.ckpt``, are resolved.

    Raises:
        ValueError: the path is a URL, not a local path.
    """
    if "://" in str(filepath):
        raise ValueError(f"{filepath}: residuals can be saved to local paths only, one file per rank")
    path = Path(filepath).resolve()
    return path.with_name(path.name.removesuffix(".ckpt") + f".{rank_files.NAME}")


for _id in registry.available():
    _description = f"DistributedDataParallel with gradients compressed by {_id}"
    StrategyRegistry.register(f"hvdcompress_{_id}", CompressedDDP, _description, override=True, method=_id)
