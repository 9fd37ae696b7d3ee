"""One rank of ``python -m experiments bench``, which starts it and gives it commands over a socket.

    python -m experiments.bench.rank SOCKET ring|mpi|gloo|ddp|mpi4py cpu|cuda

Commands and answers are dicts, by ``multiprocessing.connection``: {"do": a method of ``Exchanges``, …}, and what that
method returns or {"error": words}. The first message is the rank's: {"rank": its number, "pid": its process}.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from multiprocessing.connection import Client
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from experiments.bench.exchanges import Exchanges


def set_environment(where: str) -> None:
    """Set what MPI, Horovod and gloo read when they are loaded."""
    from experiments.cluster.rates import ring

    if where in ("ring", "mpi4py"):
        os.environ.update(ring(int(os.environ["OMPI_COMM_WORLD_SIZE"])))
    os.environ["NCCL_HOSTID"] = os.environ.get("RANK", "0")  # else NCCL refuses ranks that share a GPU
    os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = "86400"  # this process is stopped while others are measured


def join(where: str, device: str) -> Exchanges:
    """Join the other ranks over one transport; all of them must call it."""
    import torch

    from experiments.bench.clock import Clock
    from experiments.bench.contenders import OverDDP, OverHorovod, OverMPI
    from experiments.bench.exchanges import Exchanges

    torch.set_num_threads(1)
    clock = Clock()
    if where == "ddp":
        from datetime import timedelta

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


def main() -> None:
    """Answer commands until the connection is closed."""
    path, where, device = sys.argv[1:]
    set_environment(where)
    with Client(path, family="AF_UNIX") as connection:
        exchanges = join(where, device)
        connection.send({"rank": exchanges.rank, "pid": os.getpid()})
        while True:
            command = connection.recv()
            try:
                answer = getattr(exchanges, command["do"])(command)
            except Exception as error:
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            connection.send(answer)


if __name__ == "__main__":
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
        main()
