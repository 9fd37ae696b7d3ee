"""PyTorch under Horovod: any method behind the unmodified ``hvd.DistributedOptimizer(compression=…)``."""

from hvdcompress.engine.agreement import PeerError
from hvdcompress.torch.compressor import Compressor

__all__ = ["Compressor", "PeerError"]
