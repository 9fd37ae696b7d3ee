"""Compress the gradients of ``hvd.DistributedOptimizer`` under PyTorch.

    from hvdcompress.horovod.torch import DistributedOptimizer

    optimizer = DistributedOptimizer(optimizer, model.named_parameters())

Or give a :class:`Compressor` to Horovod's own ``DistributedOptimizer(…, compression=Compressor(…))``.
"""

from hvdcompress.engine.agreement import PeerError
from hvdcompress.horovod.torch.compressor import Compressor
from hvdcompress.horovod.torch.optimizer import DistributedOptimizer

__all__ = ["Compressor", "DistributedOptimizer", "PeerError"]
