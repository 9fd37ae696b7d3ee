"""Compress the gradients of PyTorch's ``DistributedDataParallel``, with a communication hook.

    from hvdcompress import ddp

    model = torch.nn.parallel.DistributedDataParallel(model)
    compressor = ddp.attach(model, "scalecom", density=0.01)

``torchrun -m hvdcompress.ddp`` attaches to the models of an unchanged script. For FSDP2 see :mod:`hvdcompress.fsdp`;
for frameworks that make the DDP module themselves see :mod:`hvdcompress.integrations`.
"""

from hvdcompress._torch.planner import ReshardingPlanner
from hvdcompress.ddp.attach import attach, hook
from hvdcompress.ddp.compressor import Compressor
from hvdcompress.ddp.local_steps import CountedLocalSteps
from hvdcompress.ddp.transport import PeerLost
from hvdcompress.engine.agreement import PeerError

__all__ = ["Compressor", "CountedLocalSteps", "PeerError", "PeerLost", "ReshardingPlanner", "attach", "hook"]
