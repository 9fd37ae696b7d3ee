"""A rank that is stopped, or takes fewer steps: every other rank says so, and ends. A launcher that is killed ends its
ranks."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.installed import needs
from tests.launched.promise_launches import MODULES
from tests.launching import environment, launch, num_nodes_of, world_size_of

HERE = Path(__file__).parent
LAUNCHES = [
    ("mpi", "mpirun-3"),
    *(
        pytest.param(driver, kind, marks=pytest.mark.slow)  # 20 seconds each, most of which is waiting
        for driver, kind in (
            ("torch", "mpi-3"),
            ("torch", "gloo-2"),
            ("tensorflow", "mpi-2"),
            ("ddp", "torchrun-2"),
            ("mpi", "mpirun-2x2"),
            ("torch", "mpi-2x2"),
            ("ddp", "torchrun-2x2"),
        )
    ),
]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("how", ["stopped", pytest.param("absent", marks=pytest.mark.slow)])
@pytest.mark.parametrize("driver,kind", LAUNCHES)
def test_a_rank_that_does_not_come_is_named_by_every_rank(driver: str, kind: str, how: str, tmp_path: Path) -> None:
    needs(*MODULES[driver])
    done = launch(kind, HERE / "stuck.py", str(tmp_path), how, seconds=120, DRIVER=driver)
    said = done.stdout.splitlines()
    assert done.returncode != 0 and (tmp_path / "before").exists(), done.stdout[-3000:]
    assert not [*tmp_path.glob("survivor-*")], "it went on as if nothing had happened"
    last = world_size_of(kind) - 1
    first = "none" if driver == "ddp" else "scalecom"  # there, tensors that are sent uncompressed are one exchange
    where = "does not answer" if how == "stopped" else "is outside of a step, after 3"
    for rank in range(last):
        # a starved core may have it wait, and warn, in an earlier step
        warned, *_, ended = [line for line in said if f"rank {rank} has waited" in line and "in step 3 for" in line]
        for line in (warned, ended):
            in_exchange = "for tensor '" in line and f"(method {first}, round " in line
            in_node = " of node " in line or " of this node" in line  # where a rank waits for another of its node
            assert in_exchange or (num_nodes_of(kind) and (in_node or "the ranks' status" in line)), line
            assert re.search(rf"missing: rank {last}( on \S+ \(\S+\))? {where}", line), line
        assert "continues to wait until 12 s" in warned, warned
        assert "This rank ends: " in ended and "hvdcompress: rank" in ended, ended
    if how == "absent":
        assert any(f"hvdcompress: rank {last} is outside of a step" in line for line in said), said


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("driver,kind", [("mpi", "mpirun-2x2"), ("torch", "mpi-2x2"), ("ddp", "torchrun-2x2")])
def test_a_rank_that_continues_after_a_stop_is_waited_for(driver: str, kind: str, tmp_path: Path) -> None:
    needs(*MODULES[driver])
    done = launch(kind, HERE / "stuck.py", str(tmp_path), "continued", seconds=120, DRIVER=driver)
    assert done.returncode == 0 and len([*tmp_path.glob("survivor-*")]) == world_size_of(kind), done.stdout[-3000:]
    assert any("has waited 3 s in step 3" in line for line in done.stdout.splitlines()), done.stdout[-3000:]


@pytest.mark.timeout(120)
def test_a_rank_that_has_ended_ends_the_others_within_seconds(tmp_path: Path) -> None:
    """In the middle of a training, with status 0, as a rank with fewer batches does. MPI alone would wait for ever."""
    needs(*MODULES["mpi"])
    began = time.monotonic()
    done = launch("mpirun-3", HERE / "stuck.py", str(tmp_path), "ended", seconds=100, DRIVER="mpi")
    assert done.returncode != 0 and not [*tmp_path.glob("survivor-*")], done.stdout[-3000:]
    assert time.monotonic() - began < 60, "`end_after` is 1800 s"
    for rank in range(2):
        (line,) = [line for line in done.stdout.splitlines() if f"hvdcompress: rank {rank} has waited" in line]
        assert "missing: rank 2 has ended" in line and "This rank ends: " in line, line


UNKNOWN = "which ranks are missing is unknown"


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "driver,kind,how,what,missing",
    [
        ("mpi", "mpirun-3", "new", "every rank's Compressor", UNKNOWN),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("torch", "mpi-2", "new", "tensor '", UNKNOWN),
                ("torch", "mpi-2", "number", "every rank's Compressor", UNKNOWN),
                ("tensorflow", "mpi-2", "new", "every rank's first trace", UNKNOWN),
                ("tensorflow", "mpi-2", "number", "every rank's Compressor", UNKNOWN),
                ("ddp", "torchrun-3", "new", "every rank's first backward pass", "missing: rank 2 has not arrived;"),
            )
        ),
    ],
)
def test_a_rank_that_never_comes_to_the_first_meeting_ends_the_others(
    driver: str, kind: str, how: str, what: str, missing: str, tmp_path: Path
) -> None:
    """Ranks have not yet told each other where they can be asked. Each says so before it ends."""
    needs(*MODULES[driver])
    done = launch(kind, HERE / "stuck.py", str(tmp_path), how, seconds=90, DRIVER=driver)
    assert done.returncode != 0 and not [*tmp_path.glob("survivor-*")], done.stdout[-3000:]
    for rank in range(world_size_of(kind) - 1):
        lines = [line for line in done.stdout.splitlines() if f"rank {rank} has waited" in line]
        assert len(lines) > 1, done.stdout[-3000:]  # where gradients come one by one it may have waited before
        assert all(f" s in step 0 for {what}" in line and missing in line for line in lines), lines
        assert "waited 1 s" in lines[0] and "continues to wait until 10 s" in lines[0], lines
        assert "waited 10 s" in lines[-1] and "This rank ends" in lines[-1], lines


@pytest.mark.slow  # tests/unit/engine/test_watchdog.py has it in one process
@pytest.mark.timeout(200)
@pytest.mark.parametrize("driver,kind", LAUNCHES)
def test_a_rank_that_comes_late_to_the_first_step_is_waited_for(driver: str, kind: str, tmp_path: Path) -> None:
    needs(*MODULES[driver])
    done = launch(kind, HERE / "stuck.py", str(tmp_path), "late", seconds=120, DRIVER=driver)
    assert done.returncode == 0 and len([*tmp_path.glob("survivor-*")]) == world_size_of(kind), done.stdout[-3000:]
    said = [line for line in done.stdout.splitlines() if "has waited" in line]
    assert len(said) >= world_size_of(kind) - 1 and all("s in step 0" in line for line in said), said
    if driver == "mpi":  # its ranks have met where they made their Compressors
        assert "missing: rank 2 is outside of a step, after 0" in said[0], said


@pytest.mark.timeout(100)
def test_ranks_of_a_launcher_that_is_killed_end(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    program = (
        "import os, sys, time, numpy as np\n"
        "from hvdcompress.mpi import Compressor\n"
        "comp = Compressor('topk')\n"
        "comp.allreduce(np.ones(9, np.float32), 'w')\n"
        "open(os.path.join(sys.argv[1], str(os.getpid())), 'w').close()\n"
        "time.sleep(90)\n"
    )
    line = ["mpirun", "--oversubscribe", "-np", "2", sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(line, env=environment("mpirun-2"), stderr=subprocess.DEVNULL) as mpirun:
        ranks: list[psutil.Process] = []
        try:
            deadline = time.monotonic() + 60
            while len(ranks) < 2 and time.monotonic() < deadline:
                time.sleep(0.2)
                ranks = [psutil.Process(int(path.name)) for path in tmp_path.iterdir()]
            assert len(ranks) == 2
            mpirun.send_signal(signal.SIGKILL)
            _, alive = psutil.wait_procs(ranks, timeout=10)
            assert not alive, "ranks run on"
        finally:
            for rank in ranks:
                if rank.is_running():
                    os.kill(rank.pid, signal.SIGKILL)


@pytest.mark.timeout(200)
def test_ranks_that_were_started_by_hand_outlive_their_shell(tmp_path: Path) -> None:
    """As with ``nohup`` and ``&``: without a launcher, the parent's end means nothing."""
    pytest.importorskip("torch")
    program = (
        "import faulthandler, os, sys, time, torch\n"
        "from torch import distributed as dist\n"
        "from torch.nn.parallel import DistributedDataParallel\n"
        "from hvdcompress import ddp\n"
        "faulthandler.dump_traceback_later(150, exit=True)\n"
        "dist.init_process_group('gloo')\n"
        "model = DistributedDataParallel(torch.nn.Linear(40, 40))\n"
        "ddp.attach(model, 'topk')\n"
        "model(torch.ones(2, 40)).sum().backward()\n"
        "shell = os.getppid()\n"
        "open(f'{sys.argv[1]}/met-{dist.get_rank()}', 'w').close()\n"
        "while os.getppid() == shell:\n"
        "    time.sleep(0.1)\n"
        "time.sleep(3)\n"
        "model(torch.ones(2, 40)).sum().backward()\n"
        "open(f'{sys.argv[1]}/done-{dist.get_rank()}', 'w').close()\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    rank = '"$1" -c "$2" "$3" > "$3/log-$RANK" 2>&1 &'
    line = f"RANK=0 {rank} RANK=1 {rank} while ! [ -e $3/met-0 -a -e $3/met-1 ]; do sleep 0.1; done"
    shell = ["sh", "-c", line, "sh", sys.executable, program, str(tmp_path)]
    subprocess.run(shell, env=environment("alone", **shared), timeout=120, check=True)
    deadline = time.monotonic() + 30
    while len([*tmp_path.glob("done-*")]) < 2 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert len([*tmp_path.glob("done-*")]) == 2, [file.read_text()[-2000:] for file in tmp_path.glob("log-*")]
