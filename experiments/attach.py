"""What exchanges a net's gradients: a method of this library, or what users have without it, in Horovod or in DDP."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from hvdcompress._torch.compressor import TensorCompressor

DENSE = "dense"
NOOP = "noop"  #: no communication: the lower bound of a step's time; DDP only
FP16 = "fp16"  #: PyTorch's or Horovod's own
POWERSGD = "ddp_powersgd_r"  #: PyTorch's hook; the rank follows
ONE_BUCKET = 1 << 16  #: MB; over gloo, DDP's PowerSGD hook aborts with more than one bucket
How = Mapping[str, Any] | str  #: a method's plan, or one of the baselines above


@dataclass
class Attached:
    """A net and an optimizer whose gradients are exchanged.

    Attributes:
        net: DDP's module; None under Horovod.
        optimizer: under Horovod its own, around the given one.
        compressor: of a method; None for baselines.
        powersgd: the state of PyTorch's PowerSGD hook.
    """

    net: Any
    optimizer: Any
    compressor: TensorCompressor | None = None
    powersgd: Any = None


def over_horovod(
    named: Sequence[tuple[str, torch.nn.Parameter]],
    optimizer: torch.optim.Optimizer,
    how: How,
    wrap: Callable[[Any], Any] = lambda compression: compression,
) -> Attached:
    """Put an optimizer into Horovod's.

    Args:
        named: the parameters by name; ranks have the same values.
        optimizer: of these parameters.
        how: what exchanges gradients.
        wrap: is called with Horovod's own compression, of a baseline, and returns the one to use.
    """
    import horovod.torch as hvd

    from hvdcompress.horovod.torch import Compressor

    compressor = None if isinstance(how, str) else Compressor(how, named)
    compression = compressor or wrap(hvd.Compression.fp16 if how == FP16 else hvd.Compression.none)
    wrapped = hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=compression)
    return Attached(None, wrapped, compressor)


def over_ddp(net: torch.nn.Module, optimizer: torch.optim.Optimizer | None, how: How) -> Attached:
    """Wrap a net in DDP.

    Args:
        net: ranks have the same values of its parameters.
        optimizer: of the net; None where nothing is updated.
        how: what exchanges gradients.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    from hvdcompress import ddp

    powersgd = isinstance(how, str) and how.startswith(POWERSGD)
    on_cpu = next(net.parameters()).device.type == "cpu"
    options: dict[str, Any] = {"bucket_cap_mb": ONE_BUCKET} if powersgd and on_cpu else {}
    model = DistributedDataParallel(net, broadcast_buffers=False, init_sync=False, **options)
    if not isinstance(how, str):
        return Attached(model, optimizer, ddp.attach(model, how))
    if powersgd:
        rank = int(how.removeprefix(POWERSGD))
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return Attached(model, optimizer, powersgd=state)
    if how == FP16:
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif how == NOOP:
        model.register_comm_hook(None, debugging_hooks.noop_hook)
    return Attached(model, optimizer)
