"""The ranks of a benchmark: started in groups, asked for one exchange at a time, and stopped in between.

A group is all ranks over one transport: "ring" and "mpi" (stock Horovod over MPI, with its ring or with the algorithm
that Open MPI chooses), "gloo" (stock Horovod), "ddp" (PyTorch's own, over gloo) and "mpi4py" (our MPI driver, with
MPI's ring). Every rank runs
``launch/bench_exchange.py``. All groups live on the same hosts at the same time, so that exchanges of one and of
another can be measured in turns. But only one of them runs: the others' processes are stopped (SIGSTOP), as Horovod
and MPI are busy even while they wait.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hvdcompress.lab.cluster import launcher
from hvdcompress.lab.cluster.hosts import Hosts

GROUPS = ("ring", "mpi", "gloo", "ddp", "mpi4py")
SCRIPT = launcher.ROOT / "launch" / "bench_exchange.py"
JOINING = 180.0  # seconds: imports of all ranks at once, on few processors
ANSWERING = 600.0  # seconds for one exchange, or for setting a contender up; and on top of that
DENSE = 12  # times what all gradients of a rank take on the link


class RankError(RuntimeError):
    """A rank failed, ended or did not answer; the message says which, and why."""


class Group:
    """All ranks over one transport, between :meth:`launch` and :meth:`stop`."""

    def __init__(self, name: str, ranks: int, hosts: Hosts | None, log: Path):
        self.name, self.ranks, self.hosts, self.log = name, ranks, hosts, log
        self.patience = ANSWERING
        self.prepared: list[str] = []  # contenders that its ranks hold, in the order in which they came
        self._launched: list[launcher.Ranks] = []
        self._lines: dict[int, _Line] = {}
        self._folder: str | None = None
        self._server: socket.socket | None = None

    @property
    def up(self) -> bool:
        """Whether its ranks have been launched."""
        return bool(self._launched)

    def launch(self) -> None:
        """Start the processes; :meth:`join` waits for them."""
        self._folder = tempfile.mkdtemp(prefix="hvdc-")  # a socket's path must be short
        path = f"{self._folder}/line"
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(path)
        self._server.listen(self.ranks)
        words = [str(SCRIPT), path, self.name]
        if self.name == "ddp":
            lines = [self._ddp_line(rank, words) for rank in range(self.ranks)]
        else:
            lines = [self._launch_line(words)]
        # hosts=None: which algorithms MPI takes is the script's business
        for line in lines:
            self._launched.append(launcher.Ranks(line, self.ranks, self.log))

    def _launch_line(self, words: list[str]) -> list[str]:
        if self.hosts is None or self.name == "gloo":
            return launcher.command(self.ranks, "gloo" if self.name == "gloo" else "mpi", *words, hosts=self.hosts)
        mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
        # what horovodrun would call, after some 7 seconds
        line = [mpirun or "mpirun", "-np", str(self.ranks), "-H", self.hosts.slots, "-bind-to", "none"]
        return self.hosts.command(self.hosts.names[0], *line, "-mca", "pml", "ob1", sys.executable, *words)

    def _ddp_line(self, rank: int, words: list[str]) -> list[str]:
        address = self.hosts.names[0] if self.hosts else "127.0.0.1"
        port = 29511 if self.hosts else 20000 + os.getpid() % 40000
        given = {"RANK": rank, "WORLD_SIZE": self.ranks, "MASTER_ADDR": address, "MASTER_PORT": port}
        line = ["env", *(f"{key}={value}" for key, value in given.items()), sys.executable, *words]
        return self.hosts.command(self.hosts.names[rank], *line) if self.hosts else line

    def join(self) -> None:
        """Wait until all ranks have met, and stop them.

        Raises:
            RankError: they did not.
        """
        assert self._server
        deadline = time.monotonic() + JOINING
        self._server.settimeout(0.2)
        lines: list[_Line] = []
        while len(lines) < self.ranks:
            with contextlib.suppress(TimeoutError):
                lines.append(_Line(self._server.accept()[0]))
                continue
            self._check_alive()
            if time.monotonic() > deadline:
                raise RankError(f"the ranks of {self.name!r} did not come within {JOINING:.0f} s\n{self._tail()}")
        self._lines = dict(enumerate(lines))
        self._lines = {reply["rank"]: lines[at] for at, reply in self._replies(deadline).items()}
        self._signal(signal.SIGSTOP)

    def _check_alive(self) -> None:
        if any(each.process.poll() is not None for each in self._launched):
            raise RankError(f"the ranks of {self.name!r} ended before they met\n{self._tail()}")

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Inside, its ranks run."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def be_patient(self, num_bytes: int) -> None:
        """What is asked for may take as long as gradients of so many bytes take on these links, many times over."""
        rate = min(rate.slower for rate in self.hosts.rates) if self.hosts else None
        self.patience = ANSWERING + (DENSE * 8 * num_bytes / rate if rate else 0.0)

    def ask(self, do: str, **more: Any) -> list[dict[str, Any]]:
        """Give all ranks a command; their answers, in rank order.

        Raises:
            RankError: a rank failed, ended or did not answer in time.
        """
        words = (json.dumps({"do": do, **more}) + "\n").encode()
        with contextlib.suppress(OSError):  # a rank that is gone is found missing when it does not answer
            for line in self._lines.values():
                line.socket.sendall(words)
        replies = self._replies(time.monotonic() + self.patience)
        return [replies[rank] for rank in sorted(replies)]

    def _replies(self, deadline: float) -> dict[int, dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        with selectors.DefaultSelector() as selector:
            for rank, line in self._lines.items():
                selector.register(line.socket, selectors.EVENT_READ, rank)
            while len(found) < len(self._lines):
                ready = selector.select(max(0.0, min(0.5, deadline - time.monotonic())))
                for key, _ in ready:
                    rank = key.data
                    reply = self._lines[rank].read()
                    if reply is not None:
                        found[rank] = reply
                        selector.unregister(key.fileobj)
                        if "error" in reply:
                            raise RankError(f"rank {rank}: {reply['error']}")
                    elif self._lines[rank].closed:
                        raise RankError(f"rank {rank} ended without a message\n{self._tail()}")
                if not ready and time.monotonic() >= deadline:
                    missing = ", ".join(str(rank) for rank in self._lines if rank not in found)
                    raise RankError(f"no answer from rank {missing} within {self.patience:.0f} s\n{self._tail()}")
        return found

    def _tail(self) -> str:
        return launcher.tail(self.log, 6)

    def _signal(self, number: int) -> None:
        for line in self._lines.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(line.pid, number)

    def stop(self) -> None:
        """End every process; the group can be launched again."""
        self._signal(signal.SIGCONT)
        for line in self._lines.values():
            line.socket.close()  # a rank that is well ends by itself then
        if self._server:
            self._server.close()
        deadline = time.monotonic() + (3.0 if self._lines else 0.0)
        while time.monotonic() < deadline and any(each.process.poll() is None for each in self._launched):
            time.sleep(0.05)
        for each in self._launched:
            each.stop(1.0)
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._launched, self._lines, self._server, self._folder = [], {}, None, None
        self.prepared.clear()


class _Line:
    """The connection to one rank."""

    def __init__(self, connection: socket.socket):
        self.socket, self._buffer, self.closed = connection, b"", False
        self.socket.settimeout(None)
        credentials = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        self.pid: int = struct.unpack("3i", credentials)[0]

    def read(self) -> dict[str, Any] | None:
        """A whole answer, or None if it is not there yet."""
        try:
            piece = self.socket.recv(1 << 16)
        except OSError:
            piece = b""
        self.closed = not piece
        self._buffer += piece
        whole, newline, rest = self._buffer.partition(b"\n")
        if not newline:
            return None
        self._buffer = rest
        return json.loads(whole)
