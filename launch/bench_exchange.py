"""One rank of ``hvdcompress bench``, which starts it and tells it what to do over a socket:

    python launch/bench_exchange.py SOCKET ring|mpi|gloo|ddp

It sets contenders up (a method behind the stock ``hvd.DistributedOptimizer``, that optimizer alone, or PyTorch's DDP)
on parameters of given shapes, and measures one exchange of their gradients at a time. What is measured: from the call
of ``backward()``, whose only work is to hand out gradients that are there already, last layer first, until all
gradients are reduced. So nothing of the exchange can hide behind computing, as in a training some of it would.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import socket
import sys
import time
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

WHERE = sys.argv[2]
if WHERE == "ring":
    from hvdcompress.hosts import RING

    os.environ.update(RING)  # MPI reads it when it starts
os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = "86400"  # we are stopped while others are measured

import torch  # noqa: E402  (Horovod's threads and MPI start with it)

torch.set_num_threads(1)

from hvdcompress import compare  # noqa: E402
from hvdcompress.ledger import Ledger  # noqa: E402

Gradients = list[torch.Tensor]


class Clock:
    """Seconds of this rank's main thread in one exchange, by what they were spent on."""

    def __init__(self) -> None:
        self.spent = {"encode": 0.0, "decode": 0.0, "blocked": 0.0}

    def timed(self, what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, charged to ``what``."""

        def run(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                self.spent[what] += time.perf_counter() - began

        return run


CLOCK = Clock()


class Given(torch.autograd.Function):
    """A parameter's part in the loss: its gradient is what lies in a box, and is taken out of it."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, box: Gradients) -> torch.Tensor:
        ctx.box = box
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return ctx.box.pop(), None  # nobody else holds it, so autograd makes it `.grad` without a copy


def loss(parameters: list[torch.nn.Parameter], gradients: Gradients) -> torch.Tensor:
    """A loss whose backward pass gives the parameters fresh copies of these gradients."""
    return torch.stack([Given.apply(p, [g.clone()]) for p, g in zip(parameters, gradients, strict=True)]).sum()


# -- contenders ------------------------------------------------------------------------------------


class Contender:
    """Parameters of a set's shapes, and a way to reduce their gradients."""

    def __init__(self, key: str, tensors: dict[str, list[int]], rank: int, world: int):
        # never read or written, so they take no memory
        self.named = {f"{key}.{name}": torch.nn.Parameter(torch.empty(shape)) for name, shape in tensors.items()}
        self.parameters, self.rank, self.world = list(self.named.values()), rank, world
        self.ledger = Ledger(world, rank)
        self.splits = True  #: its time can be told apart

    def prepare(self, gradients: Gradients) -> Callable[[], None]:
        """What is not measured; returns what is."""
        raise NotImplementedError

    def forget(self) -> None:
        """Give back what takes memory (hooks and what they hold may live on)."""


class OverHorovod(Contender):
    """The stock optimizer, with one of its own compressions or one of our methods."""

    def __init__(self, key: str, tensors: dict[str, list[int]], what: dict[str, Any]):
        import horovod.torch as hvd

        super().__init__(key, tensors, hvd.rank(), hvd.size())
        self.stock = None if what["kind"] == "method" else what["kind"]
        self.warm_up = what["warm_up"]
        self.compressor = None
        if self.stock:
            compression = Timed(getattr(hvd.Compression, self.stock))
        else:
            from hvdcompress.torch import Compressor

            self.compressor = compression = Compressor(what["settings"], self.named.items())
            self.ledger = compression.ledger
            if what["alone"]:
                compression.load_state_dict(alone(compression, self.named, what["alone"]))
        sgd = torch.optim.SGD(self.parameters, lr=0.0)
        self.optimizer = hvd.DistributedOptimizer(
            sgd, named_parameters=list(self.named.items()), compression=compression
        )

    def prepare(self, gradients: Gradients) -> Callable[[], None]:
        total = loss(self.parameters, gradients)
        for name, parameter in self.named.items():
            if self.stock:
                self.ledger.add_dense(self.rank, name, 4 * parameter.numel())
                width = 2 if self.stock == "fp16" else 4
                self.ledger.add(self.rank, name, "AllReduce", width * parameter.numel())

        def go() -> None:
            total.backward()
            self.optimizer.synchronize()

        return go

    def forget(self) -> None:
        if self.compressor:
            del self.compressor.worker  # which holds the residuals


class Timed:
    """One of Horovod's own compressions, timed."""

    def __init__(self, compression: Any):
        self.compress = CLOCK.timed("encode", compression.compress)
        self.decompress = CLOCK.timed("decode", compression.decompress)


class OverDDP(Contender):
    """PyTorch's DistributedDataParallel over gloo, dense or with one of its communication hooks."""

    def __init__(self, key: str, tensors: dict[str, list[int]], what: dict[str, Any]):
        import torch.distributed as dist
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        super().__init__(key, tensors, dist.get_rank(), dist.get_world_size())
        self.splits, self.warm_up = False, what["warm_up"]
        self.ledger = Ledger(self.world, self.rank)
        one_bucket = {"bucket_cap_mb": 1 << 16} if what["kind"] == "powersgd" else {}  # it aborts on gloo with two
        module = Net(self.parameters)
        self.module = torch.nn.parallel.DistributedDataParallel(module, init_sync=False, **one_bucket)
        self.dense = 4 * sum(parameter.numel() for parameter in self.parameters)
        self.state = None
        if what["kind"] == "fp16":
            self.module.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif what["kind"] == "powersgd":
            self.state = powerSGD_hook.PowerSGDState(None, what["matrix_rank"], start_powerSGD_iter=2)
            self.state.iter = 2  # its first two steps are dense: not what is to be measured
            self.module.register_comm_hook(self.state, powerSGD_hook.powerSGD_hook)
        self.steps = 0

    def prepare(self, gradients: Gradients) -> Callable[[], None]:
        if self.steps == 1 and self.state:  # DDP puts its bucket into another order after the first step
            for kept in (self.state.error_dict, self.state.p_memory_dict, self.state.q_memory_dict):
                kept.clear()
        self.steps += 1
        self.ledger.add_dense(self.rank, "all", self.dense)
        return self.module(gradients).backward  # DDP's backward ends when all is reduced

    def forget(self) -> None:
        del self.module, self.state  # buckets and PowerSGD's residuals


class Net(torch.nn.Module):
    """What DDP wraps."""

    def __init__(self, parameters: list[torch.nn.Parameter]):
        super().__init__()
        self.all = torch.nn.ParameterList(parameters)

    def forward(self, gradients: Gradients) -> torch.Tensor:
        return loss(list(self.all), gradients)


def alone(compressor: Any, named: dict[str, torch.nn.Parameter], steps: int) -> dict[str, Any]:
    """The state after so many steps of a method in which all ranks had the same gradients: without a network.

    For methods of several phases, whose first is not what is to be measured.
    """
    from hvdcompress.loopback import Loopback

    net = Loopback(compressor.plan, world=1)
    gradients = [g.numpy().ravel() for g in make_gradients({n: list(p.shape) for n, p in named.items()}, 0, 0.0)]
    for step in range(steps):
        net.allreduce_many(
            [
                {
                    name: _rolled(gradient, 7919 * step).reshape(tuple(parameter.shape))
                    for (name, parameter), gradient in zip(named.items(), gradients, strict=True)
                }
            ]
        )
    saved = net.workers[0].state_dict()
    saved |= {"world": compressor.worker.world, "rank": compressor.worker.rank}
    saved["state"] = {name: {s: torch.as_tensor(a) for s, a in slots.items()} for name, slots in saved["state"].items()}
    return saved


def _rolled(x: Any, places: int) -> Any:
    import numpy as np

    return np.roll(x, places)


# -- gradients --------------------------------------------------------------------------------------


def make_gradients(tensors: dict[str, list[int]], rank: int, noise: float = 1.0) -> Gradients:
    """Normal numbers: one part that all ranks have, and ``noise`` times as much of each rank's own.

    Layers differ in scale, as in nets.
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


class Set:
    """The gradients of one set on this rank, by step."""

    def __init__(self, given: dict[str, Any], rank: int):
        self.label, self.tensors = given["label"], given["tensors"]
        if given["gradients"]:
            steps = compare.load(Path(given["gradients"]))
            self.steps = [
                [torch.from_numpy(ranks[rank % len(ranks)][name].astype("float32")) for name in self.tensors]
                for ranks in steps
            ]
        else:
            first = make_gradients(self.tensors, rank)
            self.steps = [first, [gradient.flip(0) for gradient in first]]  # not the same twice in a row


# -- what the launcher asks for -----------------------------------------------------------------------


class Rank:
    """This rank between two commands."""

    def __init__(self, rank: int, meet: Callable[[], Any]):
        self.rank, self.meet = rank, meet
        self.set: Set | None = None
        self.contenders: dict[str, Contender] = {}
        self.step = 0

    def prepare(self, command: dict[str, Any]) -> dict[str, Any]:
        """Set a contender up and warm it up, if that is not done; another set's are forgotten."""
        if self.set is None or self.set.label != command["set"]["label"]:
            for key in list(self.contenders):
                self.forget({"key": key})
            self.set = Set(command["set"], self.rank)
        key = command["key"]
        if key not in self.contenders:
            make = OverDDP if WHERE == "ddp" else OverHorovod
            self.contenders[key] = make(key, self.set.tensors, command["contender"])
            for _ in range(command["contender"]["warm_up"]):
                self.measure({"key": key})
        return {}

    def measure(self, command: dict[str, Any]) -> dict[str, Any]:
        """One exchange."""
        assert self.set
        contender = self.contenders[command["key"]]
        for parameter in contender.parameters:
            parameter.grad = None
        contender.ledger.reset()
        CLOCK.spent = dict.fromkeys(CLOCK.spent, 0.0)
        self.step += 1
        go = contender.prepare(self.set.steps[self.step % len(self.set.steps)])
        self.meet()
        CLOCK.spent["blocked"] = 0.0
        start = time.monotonic()  # one clock for all ranks: their hosts are on one machine
        go()
        end = time.monotonic()
        ledger = contender.ledger
        counted = {"sent": ledger.bytes_sent(), "on_wire": ledger.bytes_on_wire(), "calls": ledger.collectives()}
        return {
            "start": start,
            "end": end,
            "dense": ledger.dense_bytes(),
            **({**CLOCK.spent} if contender.splits else {}),
            **(counted if contender.splits else {}),
        }

    def check(self, command: dict[str, Any]) -> dict[str, Any]:
        """A checksum of the reduced gradients: equal on all ranks, or they drift apart."""
        total = 0
        for parameter in self.contenders[command["key"]].parameters:
            assert parameter.grad is not None
            total = zlib.crc32(parameter.grad.contiguous().numpy().reshape(-1).view("uint8"), total)
            parameter.grad = None  # its memory is wanted by the next contender
        return {"checksum": total}

    def forget(self, command: dict[str, Any]) -> dict[str, Any]:
        """A contender is not needed soon, and memory is."""
        if contender := self.contenders.pop(command["key"], None):
            contender.forget()
        gc.collect()  # Horovod's hooks and their optimizers hold each other
        return {}


def watch_the_codec() -> None:
    """Charge the codec's seconds: until a tensor's last collective is under way to "encode", then to "decode"."""
    from hvdcompress import worker

    add_seconds = Ledger.add_seconds

    def charge(self: Ledger, rank: int, what: str, seconds: float) -> None:
        add_seconds(self, rank, what, seconds)
        CLOCK.spent["encode" if what == "select" else "blocked"] += seconds

    def late(method: Callable[..., Any], is_decode: Callable[..., bool]) -> Callable[..., Any]:
        def run(self: Any, *args: Any) -> Any:
            before = CLOCK.spent["encode"]
            result = method(self, *args)
            if is_decode(self):
                CLOCK.spent["decode"] += CLOCK.spent["encode"] - before
                CLOCK.spent["encode"] = before
            return result

        return run

    Ledger.add_seconds = charge  # type: ignore[method-assign]
    worker.Flight.advance = late(  # type: ignore[method-assign]
        worker.Flight.advance, lambda flight: flight.reduced is not None
    )
    worker.Worker.finish = late(worker.Worker.finish, lambda _: True)  # type: ignore[method-assign]


def start() -> Rank:
    """Join the other ranks."""
    if WHERE == "ddp":
        from datetime import timedelta

        import torch.distributed as dist

        dist.init_process_group("gloo", timeout=timedelta(days=1))
        return Rank(dist.get_rank(), dist.barrier)
    import horovod.torch as hvd
    import horovod.torch.optimizer as stock

    hvd.init()
    stock.synchronize = CLOCK.timed("blocked", stock.synchronize)
    watch_the_codec()
    return Rank(hvd.rank(), lambda: hvd.allreduce(torch.zeros(1), name="meet"))


def main() -> None:
    """Obey until the launcher hangs up."""
    line = socket.socket(socket.AF_UNIX)
    line.connect(sys.argv[1])
    me = start()
    with line.makefile("rw", encoding="utf-8") as stream:

        def say(answer: dict[str, Any]) -> None:
            stream.write(json.dumps(answer) + "\n")
            stream.flush()

        say({"rank": me.rank})
        for words in stream:
            command = json.loads(words)
            try:
                say(getattr(me, command["do"])(command))
            except Exception as error:
                traceback.print_exc()
                say({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        main()
