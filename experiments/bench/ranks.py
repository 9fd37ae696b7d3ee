"""The ranks of a benchmark: started in groups, asked for one exchange at a time, and stopped in between.

A group is all ranks over one transport: "ring" and "mpi" (stock Horovod over MPI, with its ring or with the algorithm
that Open MPI chooses), "gloo" (stock Horovod), "ddp" (PyTorch's own, over gloo) and "mpi4py" (our MPI driver, with
MPI's ring). Every rank runs ``rank.py``.

All groups live on the same hosts at the same time, so that exchanges of one and of another can be measured in turns.
Only one of them runs; the others' processes are stopped (SIGSTOP), as Horovod and MPI are busy even while they wait;
unless the benchmark wants them ``awake``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from experiments.cluster import launch
from experiments.cluster.hosts import Hosts

#: How the ranks of a group are started; mpirun starts those of Horovod, too
DRIVERS: dict[str, launch.Driver] = {"ring": "mpi", "mpi": "mpi", "gloo": "gloo", "ddp": "ddp", "mpi4py": "mpi"}
MODULE = "experiments.bench.rank"
JOINING = 180.0  # seconds: imports of all ranks at once, on few processors
ANSWERING = 1800.0  # seconds for one exchange, or for setting a contender up


class RankError(RuntimeError):
    """A rank failed, ended or did not answer; the message says which, and why."""


class Group:
    """All ranks over one transport, between :meth:`start` and :meth:`stop`.

    Args:
        name: one of :data:`DRIVERS`.
        ranks: how many.
        hosts: the emulated hosts that they are on, up.
        log: the file that gets all output.
        sleeps: whether they are stopped outside of :meth:`awake`.
        device: where their gradients are, "cpu" or "cuda".
    """

    def __init__(self, name: str, ranks: int, hosts: Hosts | None, log: Path, sleeps: bool = True, device: str = "cpu"):
        self.name, self.ranks, self.hosts, self.log, self.sleeps = name, ranks, hosts, log, sleeps
        self.device = device
        self.up = False
        self.pids: list[int] = []
        self._connections: list[Connection] = []  # in rank order
        self._stack = contextlib.ExitStack()

    def start(self) -> None:
        """Start the processes, wait until they have met, and let them sleep.

        Raises:
            LaunchError: they have not met.
        """
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="hvdc-"))  # a socket's path must be short
        server = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        server.bind(f"{folder}/socket")
        server.listen(self.ranks)
        words = ["-m", MODULE, f"{folder}/socket", self.name, self.device]
        # Each rank chooses for itself whether MPI's collectives are rings
        launched = self._stack.enter_context(
            launch.Ranks(launch.lines(words, self.ranks, DRIVERS[self.name], self.hosts), self.ranks, self.log)
        )
        self._stack.callback(self._hang_up, launched)
        deadline = time.monotonic() + JOINING
        while len(self._connections) < self.ranks:
            if wait([server], timeout=0.2):
                self._connections.append(Connection(server.accept()[0].detach()))
            elif launched.status() is not None or time.monotonic() > deadline:
                raise launch.LaunchError(f"the ranks of {self.name!r} ended or did not come\n{self._tail()}")
        try:
            heads = self._replies(deadline)
        except RankError as error:
            raise launch.LaunchError(str(error)) from None
        in_order = sorted(zip(heads, self._connections, strict=True), key=lambda one: one[0]["rank"])
        self._connections = [connection for _, connection in in_order]
        self.pids = [head["pid"] for head, _ in in_order]
        self.up = True
        self._sleep()

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Inside, its ranks run."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._sleep()

    def _sleep(self) -> None:
        if self.sleeps:
            self._signal(signal.SIGSTOP)

    def ask(self, do: str, **more: Any) -> list[dict[str, Any]]:
        """Give all ranks a command.

        Args:
            do: a method of ``rank.Exchanges``.
            more: its arguments.

        Returns:
            The answers, in rank order.

        Raises:
            RankError: a rank failed, ended or did not answer in time.
        """
        with contextlib.suppress(OSError):  # a rank that is gone is found missing when it does not answer
            for connection in self._connections:
                connection.send({"do": do, **more})
        return self._replies(time.monotonic() + ANSWERING)

    def _replies(self, deadline: float) -> list[dict[str, Any]]:
        """Return one message of each rank, in the order of the connections."""
        found: dict[int, dict[str, Any]] = {}
        while left := {one: rank for rank, one in enumerate(self._connections) if rank not in found}:
            ready = wait(list(left), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankError(f"no answer in time from rank {', '.join(map(str, left.values()))}\n{self._tail()}")
            for rank, connection in [(rank, one) for one, rank in left.items() if one in ready]:
                try:
                    found[rank] = connection.recv()
                except (EOFError, OSError):
                    raise RankError(f"rank {rank} ended without a message\n{self._tail()}") from None
                if "error" in found[rank]:
                    raise RankError(f"rank {rank}: {found[rank]['error']}")
        return [found[rank] for rank in sorted(found)]

    def _tail(self) -> str:
        return launch.tail(self.log, 6)

    def _signal(self, number: int) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _hang_up(self, launched: launch.Ranks) -> None:
        """Close the connections; a rank that works ends by itself then."""
        self._signal(signal.SIGCONT)
        for connection in self._connections:
            connection.close()
        deadline = time.monotonic() + (3.0 if self._connections else 0.0)
        while time.monotonic() < deadline and launched.status() is None:
            time.sleep(0.05)

    def stop(self) -> None:
        """End every process; the group can be started again."""
        self._stack.close()
        self.up, self.pids, self._connections = False, [], []
