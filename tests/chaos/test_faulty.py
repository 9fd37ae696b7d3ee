"""Faults of a rank that is killed, stopped, absent or late, or ends or raises: the other ranks name it, and end."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.installed import needs
from tests.launching import environment, launch, num_nodes_of, world_size_of

SCRIPT = Path(__file__).with_name("faulty.py")
MODULES = {
    "torch": ("torch", "horovod"),
    "ddp": ("torch",),
    "tensorflow": ("tensorflow", "horovod"),
    "mpi": ("mpi4py",),
}


def slow(*values: object) -> object:
    """Return parameters of a slow test."""
    return pytest.param(*values, marks=pytest.mark.slow)


LAUNCHES = [
    ("mpi", "mpirun-3"),
    slow("torch", "mpi-3"),
    slow("torch", "gloo-2"),
    slow("tensorflow", "mpi-2"),
    slow("ddp", "torchrun-2"),
    slow("mpi", "mpirun-2x2"),
    slow("torch", "mpi-2x2"),
    slow("ddp", "torchrun-2x2"),
]


def run(driver: str, kind: str, fault: str, out: Path) -> tuple[int, list[str]]:
    """Run ranks of which the last has a fault; return the launch's exit status and the lines that it printed.

    The launch fails unless all ranks survive.
    """
    needs(*MODULES[driver])
    done = launch(kind, SCRIPT, str(out), fault, seconds=90, DRIVER=driver)
    num_survivors = len([*out.glob("survivor-*")])
    assert list(out.glob("before-*")), done.stdout[-3000:]
    assert num_survivors == (world_size_of(kind) if done.returncode == 0 else 0), done.stdout[-3000:]
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize(
    "driver,kind",
    [("torch", "mpi-2"), ("mpi", "mpirun-2"), slow("torch", "mpi-2x2"), slow("mpi", "mpirun-2x2")],
)
def test_a_killed_rank_ends_the_others(driver: str, kind: str, tmp_path: Path) -> None:
    status, _ = run(driver, kind, "killed", tmp_path)
    assert status != 0


@pytest.mark.parametrize(
    "world_size,num_nodes,num_killed",
    [(2, 0, 1), slow(4, 0, 1), slow(4, 2, 1), slow(4, 2, 2)],  # also a whole node
)
def test_a_killed_rank_is_an_error_on_all_others_under_ddp(
    run_ddp: Callable, world_size: int, num_nodes: int, num_killed: int, tmp_path: Path
) -> None:
    more = {"NODES": str(num_nodes), "FAULTY": str(num_killed)}
    status, texts = run_ddp(world_size, tmp_path, SCRIPT, "killed", **more)
    num_left = world_size - num_killed
    assert status == [1] * num_left + [-signal.SIGKILL] * num_killed, texts
    for rank in range(num_left):
        seconds, error = (tmp_path / f"error-{rank}").read_text().split(maxsplit=1)
        assert float(seconds) < 10, f"rank {rank} waited {seconds} s; the process group's timeout is 60 s"
        assert f"the process group has failed on rank {rank}" in error


@pytest.mark.parametrize("fault,status", [("error", 1), slow("exit", 3), slow("interrupt", 1)])
def test_an_exception_in_the_backward_pass_ends_every_rank(
    run_ddp: Callable, fault: str, status: int, tmp_path: Path
) -> None:
    """It ends them at once, and not after `end_after` (1800 s) or the process group's timeout (60 s)."""
    found, texts = run_ddp(2, tmp_path, SCRIPT, fault)
    assert found == [1, status], texts
    seconds, error = (tmp_path / "error-0").read_text().split(maxsplit=1)
    assert float(seconds) < 10
    assert "rank 1: a backward pass ended before all of its gradients" in error
    assert fault != "error" or "ValueError: made by the test" in texts[1]


def test_a_rank_that_has_joined_is_named_as_the_cause(tmp_path: Path) -> None:
    """Horovod cannot gather then: with methods that gather, it ends all ranks with an error of its own."""
    status, lines = run("torch", "mpi-2", "joined", tmp_path)
    assert status != 0 and "hvd.join()" in (tmp_path / "error-0").read_text(), lines[-30:]


FLOOD = """
import faulthandler, itertools, sys, time, torch
import horovod.torch as hvd
from horovod.common.exceptions import HorovodInternalError
faulthandler.dump_traceback_later(30, exit=True)
hvd.init()
hvd.allreduce(torch.ones(8), name="both")
if hvd.rank() == 1:
    time.sleep(0.2)  # rank 0 has started thousands of all-reduces by then
    raise RuntimeError("raised on purpose")
try:
    for number in itertools.count():
        hvd.allreduce_async_(torch.ones(8), name=str(number))
except HorovodInternalError as error:
    print("rank 0:", error, flush=True)
"""


def test_all_reduces_that_start_while_a_peer_ends_raise(tmp_path: Path) -> None:
    """Without the fix in launch/horovod-0.28.1.patch, Horovod waits for a lock of its own with the GIL held."""
    needs("torch", "horovod")
    (tmp_path / "flood.py").write_text(FLOOD)
    done = launch("mpi-2", tmp_path / "flood.py", seconds=60, DRIVER="torch")
    assert "raised on purpose" in done.stdout
    assert re.search("rank 0: .*Horovod has been shut down", done.stdout), done.stdout[-3000:]


@pytest.mark.parametrize("fault", ["stopped", slow("absent")])
@pytest.mark.parametrize("driver,kind", LAUNCHES)
def test_a_rank_that_does_not_come_is_named_by_every_rank(driver: str, kind: str, fault: str, tmp_path: Path) -> None:
    status, lines = run(driver, kind, fault, tmp_path)
    assert status != 0
    last = world_size_of(kind) - 1
    method = "none" if driver == "ddp" else "randomk"  # DDP's first exchange has the tensors that are not compressed
    where = "does not answer" if fault == "stopped" else "is outside of a step, after 3"
    for rank in range(last):
        # a rank without a core may wait, and warn, in an earlier step
        warned, *_, ended = [line for line in lines if f"rank {rank} has waited" in line and "in step 3 for" in line]
        for line in (warned, ended):
            in_exchange = "for tensor '" in line and f"(method {method}, round " in line
            in_node = " of node " in line or " of this node" in line  # where a rank waits for another of its node
            assert in_exchange or (num_nodes_of(kind) and (in_node or "the ranks' status" in line)), line
            assert re.search(rf"missing: rank {last}( on \S+ \(\S+\))? {where}", line), line
        assert "continues to wait until 5 s" in warned, warned
        assert "This rank ends: " in ended and "hvdcompress: rank" in ended, ended
    if fault == "absent":
        assert any(f"hvdcompress: rank {last} is outside of a step" in line for line in lines), lines


def test_a_rank_that_has_ended_ends_the_others(tmp_path: Path) -> None:
    """It ends with status 0 in the middle of a training, like a rank with fewer batches. MPI alone would wait."""
    status, lines = run("mpi", "mpirun-3", "ended", tmp_path)
    assert status != 0
    for rank in range(2):
        (line,) = [line for line in lines if f"hvdcompress: rank {rank} has waited" in line]
        assert "missing: rank 2 has ended" in line and "This rank ends: " in line, line


UNKNOWN = "which ranks are missing is unknown"


@pytest.mark.parametrize(
    "driver,kind,fault,what,missing",
    [
        ("mpi", "mpirun-3", "new", "every rank's Compressor", UNKNOWN),
        slow("torch", "mpi-2", "new", "tensor '", UNKNOWN),
        slow("torch", "mpi-2", "elastic", "every rank's Compressor", UNKNOWN),
        slow("tensorflow", "mpi-2", "new", "every rank's first trace", UNKNOWN),
        slow("tensorflow", "mpi-2", "elastic", "every rank's Compressor", UNKNOWN),
        slow("ddp", "torchrun-3", "new", "every rank's first backward pass", "missing: rank 2 has not arrived;"),
    ],
)
def test_a_rank_that_never_comes_to_the_first_rendezvous_ends_the_others(
    driver: str, kind: str, fault: str, what: str, missing: str, tmp_path: Path
) -> None:
    """The ranks have not exchanged their endpoints yet, so each says for itself why it ends."""
    status, output = run(driver, kind, fault, tmp_path)
    assert status != 0
    for rank in range(world_size_of(kind) - 1):
        lines = [line for line in output if f"rank {rank} has waited" in line]
        assert len(lines) > 1, output[-30:]  # where gradients come one by one it may have waited before
        assert all(f" s in step 0 for {what}" in line and missing in line for line in lines), lines
        assert "waited 1 s" in lines[0] and "continues to wait until 5 s" in lines[0], lines
        assert "waited 5 s" in lines[-1] and "This rank ends" in lines[-1], lines


@pytest.mark.slow  # tests/unit/engine/safety/test_watchdog.py tries it in one process
@pytest.mark.parametrize(
    "driver,kind,fault",
    [
        *((*launch, "late") for launch in (("mpi", "mpirun-3"), ("torch", "mpi-3"), ("tensorflow", "mpi-2"))),
        *((driver, f"{kind}-2x2", fault) for driver, kind in (("ddp", "torchrun"), ("mpi", "mpirun"), ("torch", "mpi"))
          for fault in ("late", "continued")),
    ],
)  # fmt: skip
def test_a_rank_that_comes_late_is_waited_for(driver: str, kind: str, fault: str, tmp_path: Path) -> None:
    status, output = run(driver, kind, fault, tmp_path)
    assert status == 0, output[-30:]
    lines = [line for line in output if "has waited" in line]
    step = 0 if fault == "late" else 3
    # A stopped rank does not answer the first question whether all are alive; that wait counts, too
    first = ("1 s", "2 s") if fault == "continued" else ("1 s",)
    assert any(f"has waited {seconds} in step {step}" in line for line in lines for seconds in first), output[-30:]
    if (driver, fault) == ("mpi", "late"):  # its ranks have met when they made their Compressors
        assert f"missing: rank {world_size_of(kind) - 1} is outside of a step, after 0" in lines[0], lines


PROGRAM = """
import os, time
from hvdcompress.engine.safety import watchdog
from hvdcompress.plan import plan_of
watchdog.TICK = 0.05
watched = watchdog.Watchdog(0, 2, plan_of("none"), lambda: watchdog.Progress(3, None))
watched.endpoint()
parent = os.getppid()
print("watched", flush=True)
while os.getppid() == parent:
    time.sleep(0.05)
time.sleep(2)
print("survived", flush=True)
"""


@pytest.mark.parametrize("launched", [True, False])
def test_a_rank_ends_when_its_launcher_is_gone(launched: bool) -> None:
    """A rank that was started by hand outlives its shell, as with ``nohup`` and ``&``."""
    shell = ["sh", "-c", '"$@" & read line', "sh", sys.executable, "-c", PROGRAM]
    env = environment("alone", **({"HOROVOD_RANK": "0"} if launched else {}))
    pipe = subprocess.PIPE
    with subprocess.Popen(shell, env=env, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdin and process.stdout
        assert process.stdout.readline() == "watched\n"
        process.stdin.close()  # the shell ends
        output = process.stdout.read()
    assert output == "survived\n" if not launched else "is gone; this rank ends" in output
