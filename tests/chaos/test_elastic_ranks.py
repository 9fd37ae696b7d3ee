"""Horovod's and torchrun's elastic modes: a rank is killed, the others go on, and another takes its place."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.installed import needs
from tests.launched.promise_launches import MODULES
from tests.launching import environment, launch

HERE = Path(__file__).parent
NAMES = ("w", "b")


def read(folder: Path, stem: str, ranks: int) -> list[dict[str, np.ndarray]]:
    return [dict(np.load(folder / "kept" / f"{stem}-{rank}.npz")) for rank in range(ranks)]


def check(folder: Path, output: str) -> None:
    """Nothing that was committed is lost: what the ranks of each world gave is what they received, or the last keep."""
    ends = sorted((folder / "kept").glob("*-end-*.npz"))
    assert len(ends) == 3, output[-4000:]
    begun = int(ends[0].name.split("-")[0])
    assert begun > 6, "the lost rank's successor came before there was a commit without it"
    last = read(folder, f"{begun}-end", 3)
    world_sizes = [read(folder, "0-6", 3), read(folder, f"6-{begun}", 2), last]
    for name in NAMES:
        given = sum(one[f"pending.{name}"] for world_size in world_sizes for one in world_size)
        kept = sum(one[f"residual.{name}"].astype(np.float64) for one in last)
        assert np.abs(kept).max() > 0
        np.testing.assert_allclose(kept, given, 1e-4, 1e-3)
        for one in last:
            np.testing.assert_array_equal(one[f"parameters.{name}"], last[0][f"parameters.{name}"])


@pytest.mark.slow  # two minutes, most of which is waiting
@pytest.mark.timeout(400)
@pytest.mark.parametrize("driver,script", [("torch", "elastic_ranks.py"), ("tensorflow", "elastic_ranks_tf.py")])
def test_others_go_on_without_a_lost_rank_and_with_its_successor(driver: str, script: str, tmp_path: Path) -> None:
    needs(*MODULES[driver])
    check(tmp_path, elastic(script, tmp_path))


@pytest.mark.slow  # two minutes, most of which is waiting
@pytest.mark.timeout(400)
def test_local_steps_go_on_without_a_lost_rank_and_with_its_successor(tmp_path: Path) -> None:
    needs(*MODULES["torch"])
    output = elastic("elastic_local.py", tmp_path)
    ends = [dict(np.load(file)) for file in (tmp_path / "kept").glob("*-end-*.npz")]
    assert len(ends) == 3, output[-4000:]
    assert int(next((tmp_path / "kept").iterdir()).name.split("-")[0]) > 6
    for name in ends[0]:
        assert all(np.array_equal(end[name], ends[0][name]) and np.isfinite(end[name]).all() for end in ends)


def elastic(script: str, tmp_path: Path) -> str:
    """Train with Horovod's elastic launcher on three hosts; return the output."""
    (tmp_path / "kept").mkdir()
    (tmp_path / "hosts").write_text("localhost:2\n127.0.0.1:1\n")  # a host of which a rank fails is not asked again
    discover = tmp_path / "discover.sh"
    discover.write_text(f"#!/bin/sh\ncat {tmp_path}/hosts\n")
    discover.chmod(0o755)
    return launch("elastic-3", HERE / script, str(tmp_path), seconds=300, DISCOVER=str(discover)).stdout


@pytest.mark.slow  # a minute, most of which is waiting
@pytest.mark.timeout(300)
def test_torchruns_others_go_on_without_a_lost_node_and_with_its_successor(tmp_path: Path) -> None:
    """Two agents, of two ranks and of one; the second is killed with its rank, and started again after a while."""
    needs("torch")
    (tmp_path / "kept").mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def agent(ranks: int, *more: str) -> subprocess.Popen[bytes]:
        start = ["torchrun", "--nnodes", "1:2", "--nproc-per-node", str(ranks), "--max-restarts", "5"]
        meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "elastic"]
        meet += ["--rdzv-conf", f"last_call_timeout=5,is_host={int(ranks == 2)}", "--local-addr", "127.0.0.1"]
        line = [*start, *meet, "--no-python", sys.executable, str(HERE / "elastic_ranks_ddp.py"), str(tmp_path), *more]
        # else PyTorch 2.13 gives restarted ranks the store in which the lost ones' addresses are
        given = environment("torchrun-2", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
        with (tmp_path / "log").open("a") as log:
            return subprocess.Popen(line, env=given, stdout=log, stderr=log)

    agents = [agent(2), agent(1, "lost")]
    try:
        deadline = time.monotonic() + 150
        while not list((tmp_path / "kept").glob("6-15-*.npz")) and time.monotonic() < deadline:
            time.sleep(0.5)
        assert list((tmp_path / "kept").glob("6-15-*.npz")), (tmp_path / "log").read_text()[-6000:]
        agents.append(agent(1))
        status = [agents[0].wait(120), agents[2].wait(30)]
    finally:
        for each in agents:
            each.terminate()  # it ends its ranks
            each.wait(30)
    output = (tmp_path / "log").read_text()
    assert status == [0, 0], output[-6000:]
    check(tmp_path, output)
