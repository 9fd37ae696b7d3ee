"""PyTorch under Horovod: any method behind the unmodified ``hvd.DistributedOptimizer(compression=…)``.

from hvdcompress.horovod.torch import attach

optimizer = attach(optimizer, model.named_parameters())
"""

from hvdcompress.engine.agreement import PeerError
from hvdcompress.horovod.torch.attach import attach
from hvdcompress.horovod.torch.compressor import Compressor

__all__ = ["Compressor", "PeerError", "attach"]
