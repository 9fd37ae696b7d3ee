"""The former names of :mod:`experiments.cluster.launch`, for modules that are being rewritten."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.cluster import launch
from experiments.cluster.hosts import Hosts
from experiments.cluster.launch import NOISE, REPOSITORY, LaunchError, has_horovod, shown, tail
from experiments.cluster.rates import ring

__all__ = [
    "NOISE",
    "REPOSITORY",
    "LaunchError",
    "Ranks",
    "command",
    "environment",
    "has_horovod",
    "horovodrun",
    "mpirun",
]
__all__ += ["rank_line", "shown", "tail"]


def horovodrun() -> str:
    """Return horovodrun's path."""
    return launch._launcher("horovod")


def mpirun() -> str | None:
    """Return mpirun's path."""
    return shutil.which("mpirun", path=launch._search_path())


def command(ranks: int, controller: str, *program: str, hosts: Hosts | None = None) -> list[str]:
    """Return the one command line of :func:`launch.lines`."""
    drivers: dict[str, Any] = {"mpi": "horovod"}
    return launch.lines(program, ranks, drivers.get(controller, controller), hosts)[0]


def rank_line(rank: int, ranks: int, program: Sequence[str], hosts: Hosts | None = None) -> list[str]:
    """Return the command line of one rank of torch.distributed, without torchrun."""
    if hosts:
        return launch.lines(program, ranks, "ddp", hosts)[rank]
    given = {"RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 20000 + os.getpid() % 40000}
    return ["env", *(f"{key}={value}" for key, value in given.items()), sys.executable, *program]


def environment(ranks: int, hosts: Hosts | None = None) -> dict[str, str]:
    """Return the ranks' variables."""
    return {**(ring(ranks) if hosts else {}), **launch.environment(ranks)}


class Ranks(launch.Ranks):
    """Ranks of one command line."""

    def __init__(self, line: Sequence[str], ranks: int, log: Path, hosts: Hosts | None = None):
        super().__init__([line], ranks, log, ring(ranks) if hosts else None)

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The launcher."""
        return self.processes[0]
