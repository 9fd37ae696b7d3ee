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
import shutil
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
ANSWERING = 600.0  # seconds for one exchange, or for setting a contender up; and on top of that
DENSE = 12  # times what all gradients of a rank take on the link


class RankError(RuntimeError):
    """A rank failed, ended or did not answer; the message says which, and why."""


class Group:
    """All ranks over one transport, between :meth:`launch` and :meth:`stop`.

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
        self.patience = ANSWERING
        self.prepared: list[str] = []  # contenders that its ranks hold, in the order in which they came
        self._launched: launch.Ranks | None = None
        self._connections: dict[int, Connection] = {}  # by rank
        self._pids: list[int] = []
        self._folder: str | None = None
        self._server: socket.socket | None = None

    @property
    def up(self) -> bool:
        """Whether its ranks have been launched."""
        return self._launched is not None

    def launch(self) -> None:
        """Start the processes; :meth:`join` waits for them."""
        self._folder = tempfile.mkdtemp(prefix="hvdc-")  # a socket's path must be short
        path = f"{self._folder}/socket"
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(path)
        self._server.listen(self.ranks)
        words = ["-m", MODULE, path, self.name, self.device]
        lines = launch.lines(words, self.ranks, DRIVERS[self.name], self.hosts)
        # Each rank chooses for itself whether MPI's collectives are rings
        self._launched = launch.Ranks(lines, self.ranks, self.log)

    def join(self) -> None:
        """Wait until all ranks have met, and let them sleep.

        Raises:
            RankError: they did not.
        """
        assert self._server
        deadline = time.monotonic() + JOINING
        connections: list[Connection] = []
        while len(connections) < self.ranks:
            if wait([self._server], timeout=0.2):
                connections.append(Connection(self._server.accept()[0].detach()))
                continue
            self._check_alive()
            if time.monotonic() > deadline:
                raise RankError(f"the ranks of {self.name!r} did not come within {JOINING:.0f} s\n{self._tail()}")
        self._connections = dict(enumerate(connections))
        heads = self._replies(deadline)
        self._connections = {head["rank"]: connections[at] for at, head in heads.items()}
        self._pids = [head["pid"] for head in sorted(heads.values(), key=lambda head: head["rank"])]
        self._sleep()

    def _check_alive(self) -> None:
        if not self._launched or self._launched.status() is not None:
            raise RankError(f"the ranks of {self.name!r} ended before they met\n{self._tail()}")

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

    def be_patient(self, num_bytes: int) -> None:
        """Set how long an answer may take, for gradients of so many bytes on these links."""
        rate = min(rate.slower for rate in self.hosts.rates) if self.hosts else None
        self.patience = ANSWERING + (DENSE * 8 * num_bytes / rate if rate else 0.0)

    def ask(self, do: str, **more: Any) -> list[dict[str, Any]]:
        """Give all ranks a command.

        Args:
            do: a method of ``exchanges.Exchanges``.
            more: what else the command says.

        Returns:
            The answers, in rank order.

        Raises:
            RankError: a rank failed, ended or did not answer in time.
        """
        with contextlib.suppress(OSError):  # a rank that is gone is found missing when it does not answer
            for connection in self._connections.values():
                connection.send({"do": do, **more})
        replies = self._replies(time.monotonic() + self.patience)
        return [replies[rank] for rank in sorted(replies)]

    def _replies(self, deadline: float) -> dict[int, dict[str, Any]]:
        """One message of each rank, by rank."""
        found: dict[int, dict[str, Any]] = {}
        while left := {connection: rank for rank, connection in self._connections.items() if rank not in found}:
            ready = wait(list(left), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                missing = ", ".join(map(str, left.values()))
                raise RankError(f"no answer from rank {missing} within {self.patience:.0f} s\n{self._tail()}")
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = left[connection]
                try:
                    found[rank] = connection.recv()
                except (EOFError, OSError):
                    raise RankError(f"rank {rank} ended without a message\n{self._tail()}") from None
                if "error" in found[rank]:
                    raise RankError(f"rank {rank}: {found[rank]['error']}")
        return found

    def _tail(self) -> str:
        return launch.tail(self.log, 6)

    def _signal(self, number: int) -> None:
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def stop(self) -> None:
        """End every process; the group can be launched again."""
        self._signal(signal.SIGCONT)
        for connection in self._connections.values():
            connection.close()  # a rank that works ends by itself then
        if self._server:
            self._server.close()
        if self._launched:
            deadline = time.monotonic() + (3.0 if self._connections else 0.0)
            while time.monotonic() < deadline and self._launched.status() is None:
                time.sleep(0.05)
            self._launched.stop(1.0)
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._launched, self._connections, self._pids, self._server, self._folder = None, {}, [], None, None
        self.prepared.clear()
