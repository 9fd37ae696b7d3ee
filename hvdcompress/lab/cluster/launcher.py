"""Start ranks with horovodrun, watch them, and end them: the only place that does so.

What the ranks, Horovod and MPI print goes to a log file; what the user sees comes from the events that
rank 0 writes (``launch/training.py``).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from hvdcompress.lab.cluster.hosts import Hosts, ring, speed
from hvdcompress.lab.training.experiment import Experiment, Run
from hvdcompress.registry import suggest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "launch" / "train_torch.py"
SCRIPTS = {"torch": SCRIPT, "tensorflow": SCRIPT.with_name("train_tensorflow.py")}  #: by the experiment's framework
TAG = "HVDCOMPRESS_LAUNCH"  # in the environment of every process we start, so that we end ours and no other
NOISE = re.compile(
    r"tensorflow|cuda|tensorrt|oneDNN|cpu_feature_guard|absl|AVX|WARNING: All log messages|^\W*$|"
    r"^-{5,}|mpirun (noticed|detected)|Primary job|a non-zero exit code|prterun",
    re.IGNORECASE,
)


class LaunchError(RuntimeError):
    """The ranks could not be started, or ended without a word; the message says what to do."""


class Stopped(BaseException):
    """The user (or the system) asked us to stop; ``code`` is what a shell expects as exit status."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.code = 128 + number


def shown(path: Path | str) -> str:
    """A path as short as it can be from here."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def horovodrun() -> str:
    """The horovodrun of this interpreter's environment.

    Raises:
        LaunchError: Horovod is not installed.
    """
    here = shutil.which("horovodrun", path=str(Path(sys.executable).parent))
    if not here:
        raise LaunchError(
            "Horovod is not installed beside this Python, so no ranks can be started. In a clone of the "
            "project, ./launch/quickstart.sh installs all that is needed; `hvdcompress doctor` says what is missing."
        )
    return here


def command(ranks: int, controller: str, *program: str, hosts: Hosts | None = None) -> list[str]:
    """The horovodrun line that runs ``python program…`` on every rank; ``controller`` is "mpi" or "gloo"."""
    where = ["--disable-cache", "--network-interface", "eth0", "-H", hosts.slots] if hosts else []
    parts = [horovodrun(), "-np", str(ranks), f"--{controller}", *where, sys.executable, *program]
    if hosts:
        parts = hosts.command(hosts.names[0], *parts)
    return [shown(part) if os.sep in part else part for part in parts]


def link(controller: str, hosts: Hosts | None = None) -> str:
    """What the ranks' bytes go over."""
    return str(hosts or ("shared memory" if controller == "mpi" else "TCP on the loopback interface"))


def check_link(folder: Path, now: str) -> None:
    """Refuse to go on over another link than before: figures of both would stand in one table.

    Raises:
        LaunchError: it names both.
    """
    file = folder / "launch.json"
    before = json.loads(file.read_text(encoding="utf-8")).get("link", now) if file.exists() else now
    if before != now:
        raise LaunchError(
            f"{shown(folder)} holds results measured over {before}; these would go over {now}. "
            "Give another --out, or the same link."
        )


def environment(ranks: int, hosts: Hosts | None = None) -> dict[str, str]:
    """What ranks need in their environment beyond ours."""
    added = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONUNBUFFERED": "1",
        # Methods of two rounds use several collectives a tensor; Horovod's default is 1024 cached ones.
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


class Ranks:
    """A horovodrun under way: its process, and every process it started."""

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
                start_new_session=True,  # Ctrl-C reaches us alone; we end them in order
            )

    def alive(self) -> list[Any]:
        """Our processes, horovodrun and ranks; MPI puts each rank in a process group of its own."""
        import psutil

        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(TAG) == self.tag:
                    found.append(process)
        return found

    def stop(self, patience: float = 4.0) -> None:
        """End every process, asking first: SIGINT to horovodrun, SIGTERM to all, SIGKILL to all."""
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


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Inside, Ctrl-C, SIGTERM and a closed terminal raise :class:`Stopped`, once."""
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


def tail(log: Path, lines: int = 12) -> str:
    """The end of a log, without what frameworks and launchers mutter and without ranks' prefixes."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    text = text[text.rfind("\n$ ") + 1 :]  # since the last launch
    stripped = [re.sub(r"^\[\d+,\d+\]<std(out|err)>:\s?", "", line) for line in text.splitlines()[1:]]
    return "\n".join([line for line in stripped if not NOISE.search(line)][-lines:])


def tasks_module() -> ModuleType:
    """``launch/tasks.py``, which needs no framework.

    Raises:
        LaunchError: it is not there: the package was installed without the project's clone.
    """
    file = SCRIPT.with_name("tasks.py")
    if not file.is_file():
        raise LaunchError(
            f"{file} is missing: `hvdcompress run` needs the project's launch/ folder. Clone the project and "
            "install it with `pip install -e .`, or call hvdcompress from your own training script."
        )
    spec = importlib.util.spec_from_file_location("hvdcompress_launch_tasks", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def check_tasks(experiment: Experiment) -> None:
    """Refuse tasks that do not exist or whose data is not there, before any rank starts.

    Raises:
        ValueError: it names the file, the line and the key.
    """
    known = tasks_module().TASKS
    for number, task in enumerate(experiment.tasks):
        where = ("tasks", number)
        if task.task not in known:
            hint = suggest(task.task, list(known))
            raise experiment.error(
                (*where, "task"), f"unknown task {task.task!r}{hint}; known: {', '.join(sorted(known))}"
            )
        if experiment.framework not in known[task.task].frameworks:
            raise experiment.error((*where, "task"), f"{task.task!r} has no net for framework {experiment.framework!r}")
        if known[task.task].needs_path and task.path is None:
            raise experiment.error((*where, "path"), f"is missing: the task {task.task!r} reads your own data")
        if task.path is not None and not Path(task.path).expanduser().is_dir():
            raise experiment.error((*where, "path"), f"no such folder: {task.path}")


def notes(line: Sequence[str], controller: str, hosts: Hosts | None = None) -> dict[str, Any]:
    """What a reader of the results wants to know of this launch: command, commit, machine, link.

    With ``hosts`` it tries their links, which takes a second.
    """

    def git(*words: str) -> str | None:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, timeout=10)
            return done.stdout.strip() if done.returncode == 0 else None
        return None

    cpu = ""
    with contextlib.suppress(OSError):
        names = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        cpu = names[0] if names else ""
    status = git("status", "--porcelain", "--untracked-files=no")
    commit = git("rev-parse", "HEAD")
    machine = {"cores": os.cpu_count(), "cpu": cpu, "system": sys.platform}
    return {
        "command": shlex.join(line),
        "commit": commit,
        "dirty": bool(status) if commit else None,
        "machine": machine,
        "link": link(controller, hosts),
        **({"reached": [speed(bits) for bits in hosts.measure()]} if hosts else {}),
    }


def follow(
    runs: Sequence[Run], folder: Path, line: Sequence[str], ranks: int, watch: Any, hosts: Hosts | None = None
) -> None:
    """Launch until every run has a result. ``watch`` is told: see ``display.Watch``.

    A run that kills its ranks is marked as failed, and the rest is launched again.

    Raises:
        LaunchError: the ranks ended before they began a run.
        Stopped: the user pressed Ctrl-C; every rank has ended.
    """
    log = folder / "log.txt"
    with stoppable():
        while waiting := [run for run in runs if not watch.ended(run)]:
            watch.launching(ranks)
            with Ranks(line, ranks, log, hosts) as group:
                while group.process.poll() is None:
                    watch.poll()
                    time.sleep(0.1)
            watch.poll()
            left = [run for run in waiting if not watch.ended(run)]
            begun = next((run for run in left if watch.begun(run)), None)
            if left and begun is None and len(left) == len(waiting):
                raise LaunchError(f"the ranks ended before the first step:\n{tail(log)}")
            if begun is not None:
                error = f"the ranks ended (exit status {group.process.returncode}) without a message"
                event = {"event": "failed", "error": error, "traceback": tail(log)}
                with (folder / "metrics" / f"{begun.id}.jsonl").open("a", encoding="utf-8") as stream:
                    stream.write("\n" + json.dumps(event) + "\n")
                watch.poll()
