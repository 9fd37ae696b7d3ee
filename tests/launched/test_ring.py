"""The ring over MPI, as a user starts it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from experiments.report import results
from tests import ROOT
from tests.launching import launch, untraced  # with the traces of MPI mpirun would believe that it is a rank itself

pytest.importorskip("mpi4py")
SCRIPT = str(ROOT / "launch" / "ring.sh")


@pytest.mark.parametrize("world_size", (2, 3, 4))
def test_the_ring_over_mpi_is_the_simulated_one(world_size: int) -> None:
    done = launch(f"mpirun-{world_size}", Path(__file__).with_name("ring_ranks.py"), seconds=100)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(120)
def test_the_experiment_across_ranks(tmp_path: Path) -> None:
    line = [SCRIPT, "-n", "3", "--runs", "2", "-m", "topk density=0.1", "-m", "none", "--out", str(tmp_path)]
    line += ["--elements", "300", "1200"]
    done = subprocess.run(line, env=untraced(), capture_output=True, text=True, timeout=110, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    found = results.load("ring", tmp_path)
    assert found.attrs["ranks"] == 3 and {300, 1200} == set(found["elements"])
    assert len(found) == 2 * 2 * found["way"].nunique()
    last = found[found["elements"] == 1200].groupby("way").first()
    assert {"MPI", "fp32", "GradiVeQ 8x", "qsgd4", "topk density=0.1", "none"} <= set(last.index)
    assert max(last.error["MPI"], last.error["fp32"], last.error["none"]) < 1e-6
    assert 1e-6 < last.error["fp16"] < 1e-2 < last.error["topk density=0.1"] < 1
    assert last.sent["fp32"] == 2 * 2 / 3 * 4800 and found["seconds"].min() > 0
    assert "| topk density=0.1" in done.stdout and (tmp_path / "ring.svg").exists()


def test_a_wrong_number_of_ranks() -> None:
    wrong = subprocess.run([SCRIPT, "-n", "x"], capture_output=True, text=True, timeout=20)
    assert wrong.returncode == 1 and "not a number of ranks" in wrong.stderr
