"""Lightning: a strategy like ``DDPStrategy`` that compresses gradients.

    from hvdcompress.integrations.lightning import CompressedDDP

    trainer = Trainer(strategy=CompressedDDP("scalecom", {"density": 0.01}), devices=2)
    trainer = Trainer(strategy="hvdcompress_scalecom", devices=2)  # by name, with the method's defaults

Importing this module registers a strategy name for every method. Lightning's own ``ddp_comm_hook=`` is silently ignored
on devices other than CUDA, and Lightning does not save the state of a hook. This strategy also works on the CPU, and
saves the residuals.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdcompress import ddp, registry
from hvdcompress.integrations import rank_files
from hvdcompress.method import Method
from hvdcompress.plan import Plan

try:
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
except ImportError as error:
    raise ImportError("hvdcompress.integrations.lightning: pip install hvdcompress[lightning]") from error

__all__ = ["CompressedDDP"]


class CompressedDDP(DDPStrategy):
    """Lightning's ``DDPStrategy`` with compressed gradients.

    Each rank's residuals are saved next to the checkpoint, in a folder with the name of the checkpoint and the suffix
    ``.hvdcompress`` instead of ``.ckpt``. ``Trainer.fit(ckpt_path=…)`` restores them together with the optimizers'
    state, and ``ModelCheckpoint`` removes them together with the checkpoint. They are not saved for a checkpoint that
    contains only weights.

    Args:
        method: a method id, a Method, a Plan, or a plan's dict.
        settings: settings of :func:`hvdcompress.ddp.attach`: hyper-parameters and plan keys. With
            ``precision="16-mixed"``, ``loss_scale`` is taken from Lightning's scaler.
        options: options of ``DDPStrategy``, which passes them on to ``DistributedDataParallel``.

    Attributes:
        compressor: the Compressor of the last ``fit``; None before the first one.
    """

    def __init__(
        self,
        method: str | Method | Plan | Mapping[str, Any] = "scalecom",
        settings: Mapping[str, Any] | None = None,
        **options: Any,
    ):
        super().__init__(**options)
        self.method = method
        self.settings = dict(settings or {})
        self.compressor: ddp.Compressor | None = None
        self._checkpoint = ""  # path of the checkpoint that was loaded last

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
        self.compressor = ddp.attach(self.model, self.method, **{**scale, **self.settings})

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Write the checkpoint on rank 0, and the residuals on every rank.

        Raises:
            ValueError: the path is a URL, not a local path.
        """
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
        if self.compressor and "optimizer_states" in checkpoint:
            rank_files.save(self.compressor, folder_of(filepath))

    def load_checkpoint(self, checkpoint_path: str | Path, *args: Any, **options: Any) -> dict[str, Any]:
        """Read the checkpoint, and remember its path for the residuals."""
        self._checkpoint = str(checkpoint_path)
        return super().load_checkpoint(checkpoint_path, *args, **options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the state of the optimizers, and this rank's residuals.

        Raises:
            FileNotFoundError: the residuals of some ranks are missing.
            ValueError: the residuals belong to another model, or the path is a URL.
        """
        super().load_optimizer_state_dict(checkpoint)
        if self.compressor:
            rank_files.load(self.compressor, folder_of(self._checkpoint))

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove the checkpoint and its residuals. If the path is a symbolic link, remove only the link."""
        # A URL has no residuals, and the residuals of a link belong to the checkpoint that it points to
        has_none = "://" in str(filepath) or Path(filepath).is_symlink()
        super().remove_checkpoint(filepath)
        if not has_none:
            rank_files.remove(folder_of(filepath))


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
