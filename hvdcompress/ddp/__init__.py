"""PyTorch's ``DistributedDataParallel``: any method as its communication hook.

from hvdcompress import ddp

model = torch.nn.parallel.DistributedDataParallel(model)
compressor = ddp.attach(model, "scalecom", density=0.01)

``torchrun -m hvdcompress.ddp`` does so in a script that is not touched, :mod:`hvdcompress.fsdp` between the replicas of
a sharded model, and :mod:`hvdcompress.integrations` inside frameworks that make the module themselves.
"""

from hvdcompress.ddp.attach import attach, hook
from hvdcompress.ddp.compressor import Compressor
from hvdcompress.ddp.transport import PeerLost
from hvdcompress.engine.agreement import PeerError

__all__ = ["Compressor", "PeerError", "PeerLost", "attach", "hook"]
