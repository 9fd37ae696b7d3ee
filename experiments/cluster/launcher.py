"""Start ranks with horovodrun or torchrun and end them: the only place that does so.

What the ranks, Horovod and MPI print goes to a log file.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.cluster.hosts import Hosts
from experiments.cluster.rates import ring

REPOSITORY = Path(__file__).resolve().parents[2]
TAG = "HVDCOMPRESS_LAUNCH"  # in the environment of every process we start, so that we end ours and no other
NOISE = re.compile(
    r"tensorflow|cuda|tensorrt|oneDNN|cpu_feature_guard|absl|AVX|WARNING: All log messages|^\W*$|"
    r"^-{5,}|mpirun (noticed|detected)|Primary job|a non-zero exit code|prterun",
    re.IGNORECASE,
)


class LaunchError(RuntimeError):
    """The ranks could not be started, or ended without a result; the message says what to do."""


def shown(path: Path | str) -> str:
    """A path for messages: relative to the current folder where it lies inside of it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def has_horovod() -> bool:
    """Whether this interpreter's environment has a horovodrun."""
    return shutil.which("horovodrun", path=str(Path(sys.executable).parent)) is not None


def horovodrun() -> str:
    """The horovodrun of this interpreter's environment.

    Raises:
        LaunchError: Horovod is not installed.
    """
    here = shutil.which("horovodrun", path=str(Path(sys.executable).parent))
    if not here:
        raise LaunchError(
            "Horovod is not installed for this Python, so no ranks can be started. `hvdcompress doctor` says what "
            "is missing; launch/setup.sh of the project's sources builds Horovod and installs the rest. Without it: "
            "python -m experiments quickstart --driver ddp"
        )
    return here


def search_path() -> str:
    """Where commands are looked for: in this interpreter's environment first, even if it is not active."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"


def mpirun() -> str | None:
    """The mpirun that ranks are started with, by horovodrun too; None if there is none."""
    return shutil.which("mpirun", path=search_path())


def command(ranks: int, controller: str, *program: str, hosts: Hosts | None = None) -> list[str]:
    """The command line that runs a Python program on every rank.

    Args:
        ranks: how many ranks to start.
        controller: Horovod's, "mpi" or "gloo"; "ddp" for torchrun.
        program: Python's arguments, such as ``"-m", "experiments.training.train_torch", "runs/x"``.
        hosts: emulated hosts to start them on, one rank each.

    Raises:
        LaunchError: Horovod is not installed.
    """
    if controller == "ddp":
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
        parts = [sys.executable, *torchrun, *program]
        return [shown(part) if os.sep in part else part for part in parts]
    where = ["--disable-cache", "--network-interface", "eth0", "-H", hosts.slots] if hosts else []
    parts = [horovodrun(), "-np", str(ranks), f"--{controller}", *where, sys.executable, *program]
    if hosts:
        parts = hosts.command(hosts.names[0], *parts)
    return [shown(part) if os.sep in part else part for part in parts]


def rank_line(rank: int, ranks: int, program: Sequence[str], hosts: Hosts | None = None) -> list[str]:
    """The command line of one rank of torch.distributed, without torchrun: on the host of that number, or on this one.

    Args:
        rank: which one.
        ranks: how many there are.
        program: Python's arguments.
        hosts: emulated hosts, one rank each.
    """
    address = hosts.names[0] if hosts else "127.0.0.1"
    port = 29511 if hosts else 20000 + os.getpid() % 40000
    given = {"RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": address, "MASTER_PORT": port}
    line = ["env", *(f"{key}={value}" for key, value in given.items()), sys.executable, *program]
    return hosts.command(hosts.names[rank], *line) if hosts else line


def environment(ranks: int, hosts: Hosts | None = None) -> dict[str, str]:
    """The variables that ranks need in their environment beyond ours."""
    added = {
        "PATH": search_path(),
        "PYTHONPATH": os.pathsep.join(
            filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH")))
        ),  # for `-m experiments…`
        "OMP_NUM_THREADS": "1",
        "HVDCOMPRESS_THREADS": os.environ.get("HVDCOMPRESS_THREADS", "1"),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONUNBUFFERED": "1",
        # Methods of two rounds use several collectives per tensor; Horovod's default is 1024 cached ones.
        "HOROVOD_CACHE_CAPACITY": os.environ.get("HOROVOD_CACHE_CAPACITY", "8192"),
        # A rank that never comes would leave the others waiting for ever.
        "HOROVOD_STALL_CHECK_TIME_SECONDS": os.environ.get("HOROVOD_STALL_CHECK_TIME_SECONDS", "30"),
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": os.environ.get("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "120"),
    }
    if 2 * ranks > (os.cpu_count() or 1):  # a rank is two threads: the training, and Horovod's
        added["OMPI_MCA_mpi_yield_when_idle"] = "1"  # Open MPI spins while it waits: hundreds of times slower
    if hasattr(os, "geteuid") and os.geteuid() == 0:  # containers; mpirun refuses root otherwise
        added |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**(ring(ranks) if hosts else {}), **added}


def _ending_with_us() -> Callable[[], None] | None:
    """What a child calls before it becomes another program, so that a SIGTERM ends it when we are killed.

    horovodrun then ends its ranks. None where the system cannot do that (Linux can: man 2 prctl, PR_SET_PDEATHSIG).
    The signal comes at the end of the *thread* that has started the child, so only the main thread's children get it.
    """
    if sys.platform != "linux" or threading.current_thread() is not threading.main_thread():
        return None
    libc = ctypes.CDLL(None)  # loaded before the fork
    return lambda: libc.prctl(1, int(signal.SIGTERM))


class Ranks:
    """A running horovodrun: its process, and every process it started.

    Args:
        line: the command line.
        ranks: how many ranks it starts.
        log: the file that gets all output.
        hosts: the emulated hosts that the ranks are on.
    """

    def __init__(self, line: Sequence[str], ranks: int, log: Path, hosts: Hosts | None = None):
        self.tag = uuid.uuid4().hex
        with log.open("ab") as stream:
            stream.write(f"$ {shlex.join(line)}\n".encode())
            stream.flush()
            self.process = subprocess.Popen(
                line,
                stdin=subprocess.DEVNULL,  # an open pipe there can hang horovodrun
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment(ranks, hosts), TAG: self.tag},
                preexec_fn=_ending_with_us(),
                start_new_session=True,  # Ctrl-C reaches us alone; we end them in order
            )

    def alive(self) -> list[Any]:
        """The processes that run: horovodrun's and the ranks', which MPI puts into process groups of their own."""
        import psutil

        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(TAG) == self.tag:
                    found.append(process)
        return found

    def stop(self, patience: float = 4.0) -> None:
        """End every process, politely at first: SIGINT to horovodrun, SIGTERM to all, SIGKILL to all."""
        import psutil

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            for process in self.alive():
                with contextlib.suppress(psutil.Error, ProcessLookupError):
                    # mpirun passes a SIGINT on to its ranks, which are in process groups of their own.
                    if number != signal.SIGINT or os.getpgid(process.pid) == self.process.pid:
                        process.send_signal(number)
            deadline = time.monotonic() + patience
            while time.monotonic() < deadline:
                self.process.poll()
                if not self.alive():
                    return
                time.sleep(0.1)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def tail(log: Path, lines: int = 12) -> str:
    """The end of a log, without messages of frameworks and launchers, and without ranks' prefixes."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    text = text[text.rfind("\n$ ") + 1 :]  # since the last launch
    stripped = [re.sub(r"^\[\d+,\d+\]<std(out|err)>:\s?", "", line) for line in text.splitlines()[1:]]
    return "\n".join([line for line in stripped if not NOISE.search(line)][-lines:])
