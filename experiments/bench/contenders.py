"""The contenders of a benchmark: ways to reduce the gradients of a set, and the clock that watches them.

A method behind the stock ``hvd.DistributedOptimizer`` or in PyTorch's DDP, either of these alone, or the MPI driver on
NumPy arrays. All but the last get their gradients from a backward pass that only hands out prepared gradients.

``prepare(gradients)`` does what is not measured and returns the function that is; ``take()`` hands over the reduced
gradients and keeps no reference; ``forget()`` frees memory. ``splits``: whether the time can be split into codec and
waiting; ``ledger`` counts the bytes where that is possible.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from experiments.attach import FP16, over_ddp, over_horovod
from experiments.nets import Shapes
from hvdcompress.engine.telemetry.ledger import Ledger
from hvdcompress.engine.telemetry.observer import Observer, Sent
from hvdcompress.loopback import Loopback

Gradients = list[torch.Tensor]


class Given(torch.autograd.Function):
    """A parameter's part in the loss: its gradient is taken out of a box."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, box: Gradients) -> torch.Tensor:
        ctx.box = box
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.box.pop(), None  # nobody else holds it, so autograd makes it `.grad` without a copy


def loss(parameters: list[torch.nn.Parameter], gradients: Gradients) -> torch.Tensor:
    """Return a loss whose backward pass gives the parameters fresh copies of these gradients, the last one first."""
    each = zip(parameters, gradients, strict=True)
    return torch.stack([Given.apply(parameter, [gradient.clone()]) for parameter, gradient in each]).sum()  # type: ignore[no-untyped-call]


def make_gradients(tensors: Shapes, rank: int, noise: float = 1.0) -> Gradients:
    """Return normally distributed gradients of a rank; layers differ in scale, as in nets.

    Args:
        tensors: shapes by name.
        rank: whose gradients.
        noise: the size of the rank's own part, relative to the part that is equal on all ranks.
    """
    made = []
    for number, shape in enumerate(tensors.values()):
        common = torch.Generator().manual_seed(number)
        one = torch.randn(shape, generator=common)
        if noise:
            own = torch.Generator().manual_seed(1_000_000 * (rank + 1) + number)
            one += noise * torch.randn(shape, generator=own)
        made.append(one * (1e-2 / max(1, one[0].numel() if one.ndim else 1) ** 0.5))
    return made


class Clock(Observer):
    """Seconds of this rank's main thread in one exchange, as "encode", "decode" and "blocked"."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.spent = {"encode": 0.0, "decode": 0.0, "blocked": 0.0}

    def encoded(self, rank: int, name: str, seconds: float) -> None:
        self.spent["encode"] += seconds

    def decoded(self, rank: int, name: str, seconds: float) -> None:
        self.spent["decode"] += seconds

    def waited(self, rank: int, seconds: float) -> None:
        self.spent["blocked"] += seconds

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that is not ours, such as a compression of Horovod's, to charge its time to a part."""

        def run(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                self.spent[part] += time.perf_counter() - began

        return run


class OverTorch:
    """Parameters of a set's shapes, which get their gradients from a backward pass."""

    splits = True
    ledger: Ledger | None = None
    compressor: Any = None  #: of a method

    def __init__(self, tensors: Shapes, device: str):
        # Never read or written, so they take no memory
        made = {name: torch.empty(shape, device=device) for name, shape in tensors.items()}
        self.named = {name: torch.nn.Parameter(parameter) for name, parameter in made.items()}
        self.parameters = list(self.named.values())

    def take(self) -> Gradients:
        found = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        for parameter in self.parameters:
            parameter.grad = None
        return found

    def forget(self) -> None:
        if self.compressor:
            self.compressor.release()
            self.compressor.close()


class OverHorovod(OverTorch):
    """The stock optimizer, with one of Horovod's own compressions or one of our methods."""

    def __init__(self, tensors: Shapes, what: dict[str, Any], clock: Clock, device: str):
        import horovod.torch as hvd

        super().__init__(tensors, device)

        def timed(own: Any) -> SimpleNamespace:
            return SimpleNamespace(
                compress=clock.timed("encode", own.compress), decompress=clock.timed("decode", own.decompress)
            )

        attached = over_horovod(list(self.named.items()), torch.optim.SGD(self.parameters, lr=0.0), what["how"], timed)
        self.optimizer, self.compressor = attached.optimizer, attached.compressor
        if self.compressor:
            self.compressor.add_observer(clock)
            self.ledger = self.compressor.ledger
            work_alone(self.compressor, tensors, what["alone"])
        else:
            self.rank, self.ledger = hvd.rank(), Ledger(hvd.size(), hvd.rank())
            self.width = 2 if what["how"] == FP16 else 4

    def prepare(self, gradients: Gradients) -> Callable[[], None]:
        total = loss(self.parameters, gradients)
        if not self.compressor and self.ledger:
            for name, parameter in self.named.items():
                self.ledger.sent(self.rank, name, Sent("AllReduce", None, self.width * parameter.numel()))

        def go() -> None:
            total.backward()
            self.optimizer.synchronize()

        return go


class OverDDP(OverTorch):
    """PyTorch's DistributedDataParallel over gloo or NCCL: dense, with one of its hooks, or with a method."""

    splits = False

    def __init__(self, tensors: Shapes, what: dict[str, Any], clock: Clock, device: str):
        super().__init__(tensors, device)
        attached = over_ddp(Net(self.parameters), None, what["how"])
        self.module, self.compressor, self.state = attached.net, attached.compressor, attached.powersgd
        if self.compressor:
            self.compressor.add_observer(clock)
            self.ledger = self.compressor.ledger
        if self.state:
            self.state.iter = 2  # its first two steps are dense and not what is to be measured
        self.steps = 0

    def prepare(self, gradients: Gradients) -> Callable[[], None]:
        if self.steps == 1 and self.state:  # DDP reorders its bucket after the first step
            for kept in (self.state.error_dict, self.state.p_memory_dict, self.state.q_memory_dict):
                kept.clear()
        self.steps += 1
        return self.module(gradients).backward  # DDP's backward ends when all is reduced


class Net(torch.nn.Module):
    """The module that DDP wraps."""

    def __init__(self, parameters: list[torch.nn.Parameter]):
        super().__init__()
        self.all = torch.nn.ParameterList(parameters)

    def forward(self, gradients: Gradients) -> torch.Tensor:
        return loss(list(self.all), gradients)


class OverMPI:
    """A method under the MPI driver, on NumPy arrays: neither Horovod nor a backward pass."""

    splits = True

    def __init__(self, tensors: Shapes, what: dict[str, Any], clock: Clock, device: str):
        from hvdcompress.mpi import Compressor

        self.compressor = Compressor(what["how"])
        self.compressor.add_observer(clock)
        self.names, self.ledger = list(tensors), self.compressor.ledger
        self.reduced: dict[str, Any] = {}
        work_alone(self.compressor, tensors, what["alone"])

    def prepare(self, gradients: Gradients) -> Callable[[], None]:
        arrays = {name: gradient.numpy() for name, gradient in zip(self.names, gradients, strict=True)}

        def go() -> None:
            self.reduced = self.compressor.allreduce(arrays)

        return go

    def take(self) -> Gradients:
        found, self.reduced = self.reduced, {}
        return [torch.from_numpy(array) for array in found.values()]

    def forget(self) -> None:
        self.compressor.close()


def work_alone(compressor: Any, tensors: Shapes, steps: int) -> None:
    """Bring a Compressor to its state after steps without the network, as if all ranks had the same gradients.

    For methods of several phases, of which the first one is not to be measured.
    """
    if not steps:
        return
    net = Loopback(compressor.plan, world_size=1)
    gradients = dict(zip(tensors, make_gradients(tensors, 0, 0.0), strict=True))
    for step in range(steps):
        rolled = {name: g.view(-1).roll(7919 * step).view(g.shape).numpy() for name, g in gradients.items()}
        net.allreduce([rolled])
    own = {"world": compressor.rank_state.world_size, "rank": compressor.rank_state.rank}
    compressor.load_state_dict(net.ranks[0].state_dict() | own)
