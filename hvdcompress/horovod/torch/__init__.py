"""Compress the gradients of ``hvd.DistributedOptimizer`` under PyTorch.

    from hvdcompress.horovod.torch import attach

    optimizer = attach(optimizer, model.named_parameters())

Or give a :class:`Compressor` to Horovod's own ``DistributedOptimizer(…, compression=Compressor(…))``.
"""

from hvdcompress.engine.agreement import PeerError
from hvdcompress.horovod.torch.attach import attach
from hvdcompress.horovod.torch.compressor import Compressor

__all__ = ["Compressor", "PeerError", "attach"]
