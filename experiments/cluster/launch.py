"""Start ranks and end them: the only place of the experiments that builds command lines and starts processes.

    launch.run(("-m", "my.module"), num_ranks=4, driver="ddp", timeout=600)    # start, wait, raise LaunchError
    with launch.Ranks(launch.lines(("-m", "my.module"), 4, "mpi"), 4, log) as ranks:    # talk to them meanwhile

Output of the ranks and of their launcher goes to a log file.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, Self

from experiments.cluster.hosts import Hosts, ring

if TYPE_CHECKING:
    import psutil


Driver = Literal["mpi", "gloo", "ddp"]
REPOSITORY = Path(__file__).resolve().parents[2]
TAG = "HVDCOMPRESS_LAUNCH"  # in the environment of every process we start, so that we end ours and no other
NOISE = re.compile(
    r"tensorflow|cuda|tensorrt|oneDNN|cpu_feature_guard|absl|AVX|WARNING: All log messages|^\W*$|"
    r"^-{5,}|mpirun (noticed|detected)|Primary job|a non-zero exit code|prterun",
    re.IGNORECASE,
)


class LaunchError(RuntimeError):
    """Ranks could not be started, or one of them failed; the message has the end of the log."""


class Stopped(BaseException):
    """The user (or the system) asked us to stop; ``code`` is what a shell expects as exit status."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.code = 128 + number


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Inside, Ctrl-C, SIGTERM and a closed terminal raise :class:`Stopped`, once, so that ranks end in order."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        for each in before:  # a second Ctrl-C must not break off the ending of the ranks
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(number)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if number != signal.SIGHUP or handler != signal.SIG_IGN:  # nohup
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _search_path() -> str:
    """Return where commands are looked for: in this interpreter's environment first, even if it is not active."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"


def has_horovod() -> bool:
    """Return whether this interpreter's environment has a horovodrun."""
    return shutil.which("horovodrun", path=str(Path(sys.executable).parent)) is not None


def _launcher(name: str) -> str:
    if found := shutil.which(name, path=_search_path()):
        return found
    raise LaunchError(
        f"there is no {name}, so no ranks can be started. `hvdcompress doctor` says what is missing; launch/setup.sh "
        "installs Open MPI and builds Horovod. Without them: --driver ddp"
    )


def lines(program: Sequence[str], num_ranks: int, driver: Driver, hosts: Hosts | None = None) -> list[list[str]]:
    """Return the command lines that run a Python program on every rank: one, or one per rank for DDP on hosts.

    Args:
        program: Python's arguments, such as ``("-m", "experiments.training.train_torch", "runs/x")``.
        num_ranks: how many ranks to start.
        driver: "mpi" (mpirun, for Horovod over MPI, too: it is some 7 s faster than horovodrun), "gloo" (horovodrun)
            or "ddp" (torchrun).
        hosts: emulated hosts to start them on.

    Raises:
        LaunchError: the launcher is not installed.
    """
    python = [sys.executable, *program]
    if driver == "ddp" and hosts:  # torchrun's agents would need a rendezvous of their own
        given = {"WORLD_SIZE": num_ranks, "MASTER_ADDR": hosts.names[0], "MASTER_PORT": 29511}
        given |= {"GROUP_WORLD_SIZE": hosts.count, "LOCAL_WORLD_SIZE": hosts.ranks_per_host}
        found = []
        for rank in range(num_ranks):
            host, local_rank = divmod(rank, hosts.ranks_per_host)
            own = {**given, "RANK": rank, "GROUP_RANK": host, "LOCAL_RANK": local_rank}
            words = [f"{key}={value}" for key, value in own.items()]
            found.append(hosts.command(hosts.names[host], "env", *words, *python))
        return found
    if driver == "ddp":
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
        parts = [sys.executable, *launch, *program]
    elif driver == "mpi":
        where = ["-H", hosts.slots, "-mca", "pml", "ob1"] if hosts else ["--oversubscribe"]
        parts = [_launcher("mpirun"), "-np", str(num_ranks), "-bind-to", "none", *where, *python]
    else:
        where = ["--disable-cache", "--network-interface", "eth0", "-H", hosts.slots] if hosts else []
        parts = [_launcher("horovodrun"), "-np", str(num_ranks), "--gloo", *where, *python]
    return [hosts.command(hosts.names[0], *parts) if hosts else parts]


def environment(num_ranks: int) -> dict[str, str]:
    """Return the variables that ranks need in their environment beyond ours."""
    defaults = {
        "HVDCOMPRESS_THREADS": "1",
        # Methods of two rounds use several collectives per tensor; Horovod's default is 1024 cached ones.
        "HOROVOD_CACHE_CAPACITY": "8192",
        # A rank that never comes would leave the others waiting for ever.
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "30",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "120",
    }
    added = {key: os.environ.get(key, value) for key, value in defaults.items()}
    added |= {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONUNBUFFERED": "1", "PATH": _search_path()}
    added["PYTHONPATH"] = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    if 2 * num_ranks > (os.cpu_count() or 1):  # a rank is two threads: the training, and Horovod's
        added["OMPI_MCA_mpi_yield_when_idle"] = "1"  # Open MPI spins while it waits: hundreds of times slower
    if os.geteuid() == 0:  # containers; mpirun refuses root otherwise
        added |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return added


def _ending_with_us() -> Callable[[], None] | None:
    """Return what a child calls before it becomes another program, so that a SIGTERM ends it when we are killed.

    None where the system cannot do that (Linux can: man 2 prctl, PR_SET_PDEATHSIG). The signal comes at the end of the
    *thread* that has started the child, so only the main thread's children get it.
    """
    if sys.platform != "linux" or threading.current_thread() is not threading.main_thread():
        return None
    libc = ctypes.CDLL(None)  # loaded before the fork
    return lambda: libc.prctl(1, int(signal.SIGTERM))


class Ranks:
    """Running ranks. The context manager ends their launchers and every process that these have started.

    Args:
        command_lines: what :func:`lines` returned.
        num_ranks: how many ranks they start.
        log: the file that gets all output, after what it holds already.
        env: variables for the ranks, besides :func:`environment`.
    """

    def __init__(
        self, command_lines: Sequence[Sequence[str]], num_ranks: int, log: Path, env: Mapping[str, str] | None = None
    ):
        self.tag = uuid.uuid4().hex
        self.processes: list[subprocess.Popen[bytes]] = []
        with log.open("ab") as stream:
            try:
                for line in command_lines:
                    stream.write(f"$ {shlex.join(line)}\n".encode() if not self.processes else b"")
                    stream.flush()
                    self.processes.append(
                        subprocess.Popen(
                            line,
                            stdin=subprocess.DEVNULL,  # an open pipe there can hang horovodrun
                            stdout=stream,
                            stderr=subprocess.STDOUT,
                            env={**os.environ, **environment(num_ranks), **(env or {}), TAG: self.tag},
                            preexec_fn=_ending_with_us(),
                            # Ctrl-C reaches us alone; we end them in order. No session of their own: see hosts.RUN
                            process_group=0,
                        )
                    )
            except BaseException:
                self.stop()
                raise

    def status(self) -> int | None:
        """Return the exit status: None while all run well, the first failure's, or 0 when all have ended."""
        found = [process.poll() for process in self.processes]
        return next((code for code in found if code), None if None in found else 0)

    def alive(self) -> list[psutil.Process]:
        """Return the processes that run: launchers and ranks, which MPI puts into process groups of their own."""
        import psutil

        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(TAG) == self.tag:
                    found.append(process)
        return found

    def stop(self, patience: float = 4.0) -> None:
        """End every process, politely at first: SIGINT to the launchers, SIGTERM to all, SIGKILL to all."""
        import psutil

        launchers = {process.pid for process in self.processes}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            for process in self.alive():
                with contextlib.suppress(psutil.Error, ProcessLookupError):
                    # mpirun passes a SIGINT on to its ranks, which are in process groups of their own.
                    if number != signal.SIGINT or os.getpgid(process.pid) in launchers:
                        process.send_signal(number)
            deadline = time.monotonic() + patience
            while time.monotonic() < deadline:
                for launcher in self.processes:
                    launcher.poll()
                if not self.alive():
                    return
                time.sleep(0.1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def run(
    program: Sequence[str],
    num_ranks: int,
    driver: Driver,
    *,
    hosts: Hosts | None = None,
    timeout: float | None = None,
) -> str:
    """Run a Python program on every rank, and wait until all ranks have ended.

    Args:
        program: Python's arguments.
        num_ranks: how many ranks to start.
        driver: see :func:`lines`.
        hosts: emulated hosts to start them on.
        timeout: seconds after which the ranks are ended.

    Returns:
        What the ranks printed.

    Raises:
        LaunchError: the launcher is missing, a rank failed, or the time is over.
        Stopped: Ctrl-C or SIGTERM. Every rank has ended.
    """
    with contextlib.ExitStack() as stack:
        log = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hvdc-"))) / "log.txt"
        stack.enter_context(stoppable())
        env = ring(num_ranks) if hosts else {}
        # entered last: ended first
        ranks = stack.enter_context(Ranks(lines(program, num_ranks, driver, hosts), num_ranks, log, env))
        deadline = time.monotonic() + (timeout or float("inf"))
        while (status := ranks.status()) is None:
            if time.monotonic() > deadline:
                raise LaunchError(f"the ranks did not end within {timeout:g} s\n{tail(log)}")
            time.sleep(0.1)
        if status and len(ranks.processes) > 1:
            time.sleep(1.0)  # the others may say what has failed
        text = log.read_text(encoding="utf-8", errors="replace")
        if status:
            raise LaunchError(f"a rank of {num_ranks} failed (exit status {status})\n{tail(log)}")
        return text.partition("\n")[2]


def records(
    program: Sequence[str],
    num_ranks: int,
    driver: Driver,
    *,
    num_hosts: int | None = None,
    rate: str | None = None,
    timeout: float | None = None,
) -> list[dict[str, Any]]:
    """Run a program as :func:`run` does, and return what its ranks printed as JSON objects, one a line.

    Args:
        program: Python's arguments.
        num_ranks: how many ranks to start.
        driver: see :func:`lines`.
        num_hosts: emulated hosts to start them on, if there is a ``rate``; by default one for each rank.
        rate: of the hosts' links; None for ranks without emulated hosts.
        timeout: seconds after which the ranks are ended.

    Raises:
        HostsError: hosts cannot be emulated here.
        LaunchError: there is none, or as :func:`run`.
    """
    count = num_hosts or num_ranks
    with Hosts(count, rate, ranks_per_host=num_ranks // count) if rate else contextlib.nullcontext() as hosts:
        printed = run(program, num_ranks, driver, hosts=hosts, timeout=timeout)
    # horovodrun puts the rank in front of each line
    found = [line[line.find('{"') :] for line in printed.splitlines() if '{"' in line and line[-1] == "}"]
    if not found:
        raise LaunchError(f"the ranks ended without a result\n{printed[-1000:]}")
    return [json.loads(line) for line in found]


def tail(log: Path, count: int = 12) -> str:
    """Return the last lines of a log since the last launch, without noise of launchers and ranks' prefixes."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    text = text[text.rfind("\n$ ") + 1 :]
    stripped = [re.sub(r"^\[\d+,\d+\]<std(out|err)>:\s?", "", line) for line in text.splitlines()[1:]]
    return "\n".join([line for line in stripped if not NOISE.search(line)][-count:])
