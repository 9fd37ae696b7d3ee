"""Compression for frameworks that make the ``DistributedDataParallel`` module themselves.

There is one module per framework: ``lightning``, ``accelerate`` and ``transformers`` (the Hugging Face ``Trainer``).
Each attaches a :class:`hvdcompress.ddp.Compressor`, and saves and restores the residuals together with the framework's
checkpoints, in one file per rank. Each needs its framework: ``pip install hvdcompress[lightning]``, ``[accelerate]`` or
``[transformers]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hvdcompress import ddp


def attached(
    model: Any, method: Any, scaler: Any, settings: Mapping[str, Any]
) -> ddp.Compressor | ddp.CountedLocalSteps:
    """Attach to a DDP model, with the loss scale of the framework's scaler, which local steps do not need.

    Args:
        model: the wrapped model.
        method: as for :func:`hvdcompress.ddp.attach`.
        scaler: the framework's GradScaler; None without one.
        settings: settings of :func:`hvdcompress.ddp.attach`; a ``loss_scale`` among them is used instead.
    """
    scale = {"loss_scale": scaler.get_scale} if scaler and not settings.get("local_steps") else {}
    return ddp.attach(model, method, **{**scale, **settings})
