"""PyTorch under Horovod: any method behind the unmodified ``hvd.DistributedOptimizer(compression=…)``."""

from hvdcompress.torch.compressor import Compressor, PeerError

__all__ = ["Compressor", "PeerError"]
