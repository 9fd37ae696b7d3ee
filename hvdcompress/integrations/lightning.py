"""Lightning: a strategy that trains like ``DDPStrategy``, and compresses what is exchanged.

    from hvdcompress.integrations.lightning import CompressedDDP

    trainer = Trainer(strategy=CompressedDDP("scalecom", {"density": 0.01}), devices=2)
    trainer = Trainer(strategy="hvdcompress_scalecom", devices=2)  # by name, with the method's defaults

Importing this module registers a name for every method. Lightning's own ``ddp_comm_hook=`` is ignored in silence on
anything but CUDA, and its checkpoints do not have a hook's state: this strategy works on the CPU, too, and saves it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdcompress import ddp, registry
from hvdcompress.integrations import beside
from hvdcompress.method import Method
from hvdcompress.plan import Plan

try:
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
except ImportError as error:
    raise ImportError("hvdcompress.integrations.lightning: pip install hvdcompress[lightning]") from error

__all__ = ["CompressedDDP"]


class CompressedDDP(DDPStrategy):
    """``DDPStrategy`` with compressed gradients.

    Each rank's residuals are saved next to a checkpoint, in a folder of its name with ``.hvdcompress`` for ``.ckpt``;
    ``Trainer.fit(ckpt_path=…)`` restores them with the optimizers' state, and ``ModelCheckpoint`` removes both
    together. A checkpoint of the weights alone has none.

    Args:
        method: a method id, a Method, a Plan, or a plan's dict.
        settings: hyper-parameters and plan keys. With ``precision="16-mixed"``, ``loss_scale`` is the scaler's.
        options: of ``DDPStrategy``, and through it of ``DistributedDataParallel``.

    Attributes:
        compressor: of the last ``fit``; None before.
    """

    def __init__(
        self,
        method: str | Method | Plan | Mapping[str, Any] = "scalecom",
        settings: Mapping[str, Any] | None = None,
        **options: Any,
    ):
        super().__init__(**options)
        self.method, self.settings = method, dict(settings or {})
        self.compressor: ddp.Compressor | None = None
        self._checkpoint = ""  # that was read last

    def configure_ddp(self) -> None:
        """Wrap the model, and attach to it.

        Raises:
            ValueError: the plan is wrong, or the model has an option with which there is no compression.
        """
        super().configure_ddp()
        if self.compressor:
            self.compressor.close()
        scaler = getattr(self.precision_plugin, "scaler", None)
        scale = {"loss_scale": scaler.get_scale} if scaler else {}
        self.compressor = ddp.attach(self.model, self.method, **{**scale, **self.settings})

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Write the checkpoint on rank 0, and this rank's residuals.

        Raises:
            ValueError: the path is not one of this machine's.
        """
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
        if self.compressor and "optimizer_states" in checkpoint:
            beside.save(self.compressor, folder_of(filepath))

    def load_checkpoint(self, checkpoint_path: str | Path, *args: Any, **options: Any) -> dict[str, Any]:
        """Read the checkpoint, and note where its residuals are."""
        self._checkpoint = str(checkpoint_path)
        return super().load_checkpoint(checkpoint_path, *args, **options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the optimizers, and this rank's residuals.

        Raises:
            FileNotFoundError: the residuals of some ranks are missing.
            ValueError: they are of another model, or the path is not one of this machine's.
        """
        super().load_optimizer_state_dict(checkpoint)
        if self.compressor:
            beside.load(self.compressor, folder_of(self._checkpoint))

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove the checkpoint, and its residuals; of a link only the link."""
        kept = "://" in str(filepath) or Path(filepath).is_symlink()  # none there, or another checkpoint's
        super().remove_checkpoint(filepath)
        if not kept:
            beside.remove(folder_of(filepath))


def folder_of(filepath: str | Path) -> Path:
    """Where a checkpoint's residuals are; ``last.ckpt`` may be a link to another.

    Raises:
        ValueError: it is not on this machine.
    """
    if "://" in str(filepath):
        raise ValueError(f"{filepath}: residuals are saved to local paths only, one file per rank")
    path = Path(filepath).resolve()
    return path.with_name(path.name.removesuffix(".ckpt") + f".{beside.NAME}")


for _id in registry.available():
    _what = f"DistributedDataParallel, gradients compressed by {_id}"
    StrategyRegistry.register(f"hvdcompress_{_id}", CompressedDDP, _what, override=True, method=_id)
