"""What the Compressors of all drivers have in common: they keep one rank's state, and hear of metrics and triggers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from hvdcompress.engine import checkpoint
from hvdcompress.engine.rank import Worker


class RankState(ABC):
    """A driver's Compressor, as far as it does without I/O."""

    worker: Worker
    loss_scale: float | Callable[[], float]

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """This rank's state (every rank has its own: save one file a rank): plan, steps, residuals."""

    @abstractmethod
    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` saved on this rank."""

    def save(self, folder: str | Path) -> Path:
        """Write this rank's state to its own file in ``folder``; call it on every rank."""
        return checkpoint.save(self.state_dict(), folder)

    def load(self, folder: str | Path) -> None:
        """Read this rank's state from ``folder``; states of another number of ranks are re-sharded.

        Raises:
            FileNotFoundError, ValueError: there is none, or it does not fit.
        """
        self.load_state_dict(checkpoint.load(folder, self.worker.rank, self.worker.world))

    def observe(self, **metrics: float) -> None:
        """Tell the methods of metrics, ``loss=…`` or ``learning_rate=…``: some restart their schedule on them.

        Call it on any rank or on all, at any time: what one rank notices, all act on, after the next step. GradiVeQ
        learns its basis anew when the learning rate drops; FFT sends more when the loss gets worse.
        """
        self.worker.observe(metrics)

    def trigger(self) -> None:
        """Restart every method's schedule on all ranks after the next step; it is enough that one rank calls this."""
        self.worker.asks_for_trigger = True

    def current_loss_scale(self) -> float:
        """The loss scale that is on now.

        Raises:
            ValueError: it is no positive finite number.
        """
        scale = float(self.loss_scale() if callable(self.loss_scale) else self.loss_scale)
        if not (isfinite(scale) and scale > 0):
            raise ValueError(f"loss_scale is {scale}; it must be a positive finite number")
        return scale
