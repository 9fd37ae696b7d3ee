"""One rank of ``python -m experiments bench``, which starts it and gives it commands over a socket.

    python -m experiments.bench.rank SOCKET ring|mpi|gloo|ddp|mpi4py cpu|cuda

Commands and answers are dicts, by ``multiprocessing.connection``: {"do": a method of :class:`Exchanges`, its
arguments}, and what that method returns or {"error": words}. The first message is the rank's: {"rank": its number,
"pid": its process}.

An exchange is measured from the call of ``backward()``, which only hands out gradients that exist already, last layer
first, or of the MPI driver with arrays, until all gradients are reduced. So no part of it is hidden behind computing,
as a part would be in a training.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
import time
import traceback
import zlib
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import torch

from experiments.bench.contenders import Clock, Gradients, OverDDP, OverHorovod, OverMPI, make_gradients
from experiments.cluster.hosts import ring
from experiments.training import gradients as saved
from hvdcompress.engine.state import RankState


class Exchanges:
    """One rank's contender, and the commands of the process that measures.

    Args:
        rank: this rank.
        make: the class of contenders.
        meet: returns when all ranks have called it.
        clock: what contenders report to.
        device: where gradients are, "cpu" or "cuda".
    """

    def __init__(
        self,
        rank: int,
        make: type[OverHorovod | OverDDP | OverMPI],
        meet: Callable[[], Any],
        clock: Clock,
        device: str = "cpu",
    ):
        self.rank, self.make, self.meet, self.clock, self.device = rank, make, meet, clock, device
        self.wait: Callable[[], Any] = torch.cuda.synchronize if device == "cuda" else lambda: None
        self.set: dict[str, Any] = {}
        self.steps: list[Gradients] = []
        self.contender: OverHorovod | OverDDP | OverMPI | None = None
        self.step = 0

    def prepare(self, set: dict[str, Any], contender: dict[str, Any]) -> dict[str, Any]:
        """Set a contender up and warm it up. The one before is forgotten, as memory would not suffice for all."""
        if self.contender:
            self.contender.forget()
            self.contender = None
            gc.collect()  # Horovod's hooks and their optimizers hold each other
            if sys.platform == "linux":  # else a rank of many contenders grows to gigabytes, most of them free
                ctypes.CDLL(None).malloc_trim(0)
        if self.set != set:
            self.set, self.steps = set, self._gradients(set)
        self.contender = self.make(set["tensors"], contender, self.clock, self.device)
        for _ in range(contender["warm_up"]):
            self.measure()
        return {}

    def _gradients(self, set: dict[str, Any]) -> list[Gradients]:
        """Return this rank's gradients of a set, by step."""
        if set["gradients"]:
            ranks = [step[self.rank % len(step)] for step in saved.load(Path(set["gradients"]))]
            steps = [[torch.from_numpy(one[name].astype("float32")) for name in set["tensors"]] for one in ranks]
        else:
            first = make_gradients(set["tensors"], self.rank)
            steps = [first, [gradient.flip(0) for gradient in first]]  # not the same twice in a row
        return [[gradient.to(self.device) for gradient in step] for step in steps]

    def measure(self) -> dict[str, Any]:
        """Measure one exchange: when it began and ended, how its time was spent, and its bytes."""
        contender = self.contender
        assert contender
        contender.take()  # what the last exchange left
        if contender.ledger:
            contender.ledger.reset()
        self.clock.reset()
        self.step += 1
        go = contender.prepare(self.steps[self.step % len(self.steps)])
        self.wait()
        self.meet()
        self.clock.spent["blocked"] = 0.0
        cpu = time.process_time()
        start = time.monotonic()  # one clock for all ranks: their hosts are on one machine
        go()
        self.wait()
        found = {"start": start, "end": time.monotonic(), "cpu": time.process_time() - cpu}
        if contender.compressor:
            found["codec"] = self.clock.spent["encode"] + self.clock.spent["decode"]
            found["state"] = state_bytes(contender.compressor.rank_state)
        if contender.splits:
            found |= self.clock.spent
        if ledger := contender.ledger:
            found |= {"sent": ledger.bytes_sent(), "on_wire": ledger.bytes_on_wire(), "calls": ledger.collectives()}
        return found

    def check(self) -> dict[str, Any]:
        """Return a checksum of the reduced gradients, which must be equal on all ranks."""
        assert self.contender
        total, reduced = 0, self.contender.take()
        assert len(reduced) == len(self.steps[0]), "a gradient is missing"
        for gradient in reduced:
            total = zlib.crc32(gradient.cpu().contiguous().numpy().tobytes(), total)
        return {"checksum": total}


def join(where: str, device: str) -> Exchanges:
    """Join the other ranks over one transport; all of them must call it."""
    if where in ("ring", "mpi4py"):
        os.environ.update(ring(int(os.environ["OMPI_COMM_WORLD_SIZE"])))
    os.environ["NCCL_HOSTID"] = os.environ.get("RANK", "0")  # else NCCL refuses ranks that share a GPU
    os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = "86400"  # this process is stopped while others are measured
    torch.set_num_threads(1)
    clock = Clock()
    if where == "ddp":
        import torch.distributed as dist

        dist.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl", timeout=timedelta(days=1))
        return Exchanges(dist.get_rank(), OverDDP, lambda: dist.all_reduce(torch.zeros(1)), clock, device)
    if where == "mpi4py":
        from mpi4py import MPI

        return Exchanges(MPI.COMM_WORLD.rank, OverMPI, MPI.COMM_WORLD.Barrier, clock)
    import horovod.torch as hvd
    import horovod.torch.optimizer as stock

    hvd.init()
    stock.synchronize = clock.timed("blocked", stock.synchronize)  # where Horovod's own optimizer waits
    return Exchanges(hvd.rank(), OverHorovod, lambda: hvd.allreduce(torch.zeros(1), name="meet"), clock)


def state_bytes(local: RankState) -> int:
    """Return the bytes of memory that a rank holds for state, including second buffers and scratch."""
    arrays: list[Any] = [state.arrived for state in local.states.values() if state.arrived is not None]
    for state in local.states.values():
        arrays += [array for slots in (state.slots, *state.members) for array in slots.values()]
    for memory in local.memory.values():
        arrays += [array for pair in memory.pairs.values() for array in pair]
        arrays += [array for each in memory.scratch.values() for array in each.values()]
    return sum({id(array): int(array.nbytes) for array in arrays}.values())


def main() -> None:
    """Answer commands until the connection is closed."""
    path, where, device = sys.argv[1:]
    with Client(path, family="AF_UNIX") as connection:
        exchanges = join(where, device)
        connection.send({"rank": exchanges.rank, "pid": os.getpid()})
        while True:
            command = connection.recv()
            try:
                answer = getattr(exchanges, command.pop("do"))(**command)
            except Exception as error:
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            connection.send(answer)


if __name__ == "__main__":
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
        main()
