"""Lightning: strategies like ``DDPStrategy`` that compress gradients, or take local steps.

    from hvdcompress.integrations.lightning import CompressedDDP

    trainer = Trainer(strategy=CompressedDDP("scalecom", density=0.01), devices=2)
    trainer = Trainer(strategy="hvdcompress_scalecom", devices=2)  # by name, with the method's defaults
    trainer = Trainer(strategy=LocalStepsDDP(30, method="qsgd"), devices=2)

Importing this module registers a strategy name for every method. Lightning's own ``ddp_comm_hook=`` is silently ignored
on devices other than CUDA, and Lightning does not save the state of a hook. This strategy also works on the CPU, and
saves the residuals.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from hvdcompress import ddp, registry
from hvdcompress.integrations import rank_files
from hvdcompress.local_steps import LocalSteps
from hvdcompress.method import Method
from hvdcompress.plan import Plan

try:
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
except ImportError as error:
    raise ImportError("hvdcompress.integrations.lightning: pip install hvdcompress[lightning]") from error

__all__ = ["CompressedDDP", "LocalStepsDDP"]


class _RankFiles(DDPStrategy):
    """Saves, restores and removes the state of each rank together with Lightning's checkpoints."""

    _checkpoint = ""  # path of the checkpoint that was loaded last
    _state: ddp.Compressor | LocalSteps | None = None  # what has the state of this rank

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Write the checkpoint on rank 0, and each rank's state on every rank.

        Raises:
            ValueError: the path is a URL, not a local path.
        """
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
        if "optimizer_states" in checkpoint and self._state:
            self._state.save(folder_of(filepath))

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
        if self._state:
            rank_files.load(self._state, folder_of(self._checkpoint))

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove the checkpoint and the states. If the path is a symbolic link, remove only the link."""
        # A URL has no states, and the states of a link belong to the checkpoint that it points to
        has_none = "://" in str(filepath) or Path(filepath).is_symlink()
        super().remove_checkpoint(filepath)
        if not has_none:
            rank_files.remove(folder_of(filepath))


class CompressedDDP(_RankFiles):
    """Lightning's ``DDPStrategy`` with compressed gradients.

    Each rank's residuals are saved next to the checkpoint, in a folder with the name of the checkpoint and the suffix
    ``.hvdcompress`` instead of ``.ckpt``. ``Trainer.fit(ckpt_path=…)`` restores them together with the optimizers'
    state, and ``ModelCheckpoint`` removes them together with the checkpoint. They are not saved for a checkpoint that
    contains only weights.

    Args:
        method: a method id, a Method, a Plan, or a plan's dict.
        settings: settings of :func:`hvdcompress.ddp.attach`: hyper-parameters and plan keys; and options of
            ``DDPStrategy`` and ``DistributedDataParallel``. With ``precision="16-mixed"``, ``loss_scale`` is taken from
            Lightning's scaler.

    Attributes:
        compressor: the Compressor of the last ``fit``; None before the first one.
    """

    def __init__(
        self,
        method: str | Method | Plan | Mapping[str, Any] = "auto",
        **settings: Any,
    ):
        super().__init__(**_options_of_ddp(settings))
        self.method = method
        self.settings = settings
        self.compressor: ddp.Compressor | None = None

    def configure_ddp(self) -> None:
        """Wrap the model in ``DistributedDataParallel``, and attach a Compressor.

        Raises:
            ValueError: the plan is wrong, or the model uses an option that compression does not support.
        """
        super().configure_ddp()
        if self.compressor:
            self.compressor.close()
        scaler = getattr(self.precision_plugin, "scaler", None)
        scale = {"loss_scale": scaler.get_scale} if scaler else {}
        self.compressor = self._state = ddp.attach(self.model, self.method, **{**scale, **self.settings})


class LocalStepsDDP(_RankFiles):
    """Each rank trains alone, and the ranks exchange their parameters every few steps of the optimizer.

    Processes, devices and data are those of ``DDPStrategy``, but the model is not wrapped in
    ``DistributedDataParallel``. Parameters are also exchanged before validation and at the end. The state of each rank
    is saved next to the checkpoint, as that of :class:`CompressedDDP`.

    Args:
        every: steps from one exchange to the next.
        settings: further arguments of :class:`hvdcompress.local_steps.LocalSteps`, other than ``checkpoint``, and
            options of ``DDPStrategy``.

    Attributes:
        local: the LocalSteps of the last ``fit``; None before the first one.
    """

    def __init__(self, every: int, **settings: Any):
        super().__init__(**_options_of_ddp(settings))
        self.every = every
        self.settings = settings
        self.local: LocalSteps | None = None

    def configure_ddp(self) -> None:
        """Leave the model unwrapped."""

    def setup_optimizers(self, trainer: Any) -> None:
        """Create the optimizer, and LocalSteps with it.

        Raises:
            ValueError: there are several optimizers, or an argument is out of range.
        """
        super().setup_optimizers(trainer)
        if len(self.optimizers) != 1:
            raise ValueError(f"local steps need one optimizer, and configure_optimizers() made {len(self.optimizers)}")
        self.local = self._state = LocalSteps(self.model, self.optimizers[0], every=self.every, **self.settings)

    def optimizer_step(self, *args: Any, **options: Any) -> Any:
        """Take a step of the optimizer, and exchange parameters if they are due."""
        output = super().optimizer_step(*args, **options)
        if self.local:
            self.local.step()
        return output

    def on_validation_start(self) -> None:
        """Exchange parameters, so that all ranks validate the same model."""
        if self.local:
            self.local.synchronize()

    def on_train_end(self) -> None:
        """Exchange parameters, so that all ranks end with the same model."""
        if self.local:
            self.local.synchronize()

    def teardown(self) -> None:
        """Free the process groups."""
        if self.local:
            self.local.close()
        super().teardown()


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
