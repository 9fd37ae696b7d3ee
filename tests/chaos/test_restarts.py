"""Trainings that go on after a rank was killed: all ranks are started again, or another rank takes its place."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.installed import needs
from tests.launching import environment, launch

LOCAL_STEPS = Path(__file__).with_name("local_steps.py")
ELASTIC = Path(__file__).with_name("elastic.py")


def test_local_steps_go_on_from_the_last_exchange_under_ddp(run_ddp: Callable, tmp_path: Path) -> None:
    status, texts = run_ddp(2, tmp_path, LOCAL_STEPS)
    assert status == [1, -signal.SIGKILL], texts
    assert "the process group has failed on rank 0" in texts[0]
    status, texts = run_ddp(2, tmp_path, LOCAL_STEPS)
    assert status == [0, 0], texts


@pytest.mark.slow
def test_local_steps_go_on_from_the_last_exchange_under_horovod(tmp_path: Path) -> None:
    """mpirun ends all ranks when one is killed."""
    needs("torch", "horovod")
    killed, restarted = (launch("mpi-2", LOCAL_STEPS, str(tmp_path), seconds=120, DRIVER="torch") for _ in range(2))
    assert killed.returncode != 0 and (tmp_path / "killed").exists(), killed.stdout[-3000:]
    assert restarted.returncode == 0 and (tmp_path / "end-0").exists(), restarted.stdout[-3000:]


def check_nothing_is_lost(folder: Path, output: str) -> None:
    """Check that the gradients of all worlds' ranks are what they received and what the last ranks keep."""
    files = sorted((folder / "kept").glob("*-end-*.npz"))
    assert len(files) == 3, output[-4000:]
    begun = int(files[0].name.split("-")[0])
    assert begun > 6, "the lost rank's successor came before there was a commit without it"
    files += [folder / "kept" / f"{name}.npz" for name in ("0-6-0", "0-6-1", "0-6-2", f"6-{begun}-0", f"6-{begun}-1")]
    arrays = [dict(np.load(file)) for file in files]
    ends = arrays[:3]
    for name in ("w", "b"):
        given = sum(one[f"pending.{name}"] for one in arrays)
        kept = sum(end[f"residual.{name}"].astype(np.float64) for end in ends)
        assert np.abs(kept).max() > 0
        np.testing.assert_allclose(kept, given, 1e-4, 1e-3)
    for name in ends[0]:
        if name.startswith("parameters"):
            assert np.isfinite(ends[0][name]).all()
            np.testing.assert_array_equal(ends[1][name], ends[0][name])
            np.testing.assert_array_equal(ends[2][name], ends[0][name])


@pytest.mark.slow  # two minutes, most of which is waiting
@pytest.mark.timeout(400)
@pytest.mark.parametrize("driver", ["torch", "tensorflow"])
def test_horovods_other_ranks_go_on_without_a_lost_one_and_with_its_successor(driver: str, tmp_path: Path) -> None:
    needs("horovod", driver)
    (tmp_path / "kept").mkdir()
    (tmp_path / "hosts").write_text("localhost:2\n127.0.0.1:1\n")  # a host of which a rank fails is not asked again
    discover = tmp_path / "discover.sh"
    discover.write_text(f"#!/bin/sh\ncat {tmp_path}/hosts\n")
    discover.chmod(0o755)
    done = launch("elastic-3", ELASTIC, str(tmp_path), seconds=280, DRIVER=driver, DISCOVER=str(discover))
    check_nothing_is_lost(tmp_path, done.stdout)


@pytest.mark.slow  # a minute, most of which is waiting
def test_torchruns_others_go_on_without_a_lost_node_and_with_its_successor(tmp_path: Path) -> None:
    """Two agents, of two ranks and of one; the second is killed with its rank, and started again after a while."""
    needs("torch")
    (tmp_path / "kept").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def start_agent(num_ranks: int, **more: str) -> subprocess.Popen[bytes]:
        start = ["torchrun", "--nnodes", "1:2", "--nproc-per-node", str(num_ranks), "--max-restarts", "5"]
        meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "elastic"]
        meet += ["--rdzv-conf", f"last_call_timeout=5,is_host={int(num_ranks == 2)}", "--local-addr", "127.0.0.1"]
        line = [*start, *meet, "--no-python", sys.executable, str(ELASTIC), str(tmp_path)]
        # else PyTorch 2.13 to 2.15 gives restarted ranks the store in which the lost ones' addresses are
        env = environment("torchrun-2", DRIVER="ddp", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1", **more)
        with (tmp_path / "log").open("a") as log:
            return subprocess.Popen(line, env=env, stdout=log, stderr=log)

    agents = [start_agent(2), start_agent(1, LOST="1")]
    try:
        deadline = time.monotonic() + 150
        while not list((tmp_path / "kept").glob("6-15-*.npz")):
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()[-6000:]
            time.sleep(0.5)
        agents.append(start_agent(1))
        status = [agents[0].wait(120), agents[2].wait(30)]
    finally:
        for each in agents:
            each.terminate()  # it ends its ranks
            each.wait(30)
    output = (tmp_path / "log").read_text()
    assert status == [0, 0], output[-6000:]
    check_nothing_is_lost(tmp_path, output)
