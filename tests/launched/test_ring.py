"""The ring over MPI, as a user starts it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from experiments.report import results
from tests import ROOT
from tests.launching import launch, untraced  # with the traces of MPI, mpirun would believe that it is a rank itself

pytest.importorskip("mpi4py")
SCRIPT = str(ROOT / "launch" / "ring.sh")


@pytest.mark.parametrize("world_size", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_the_ring_over_mpi_equals_the_simulated_one(world_size: int) -> None:
    done = launch(f"mpirun-{world_size}", Path(__file__).with_name("ring_ranks.py"), seconds=100)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(120)
def test_the_experiment_across_ranks(tmp_path: Path) -> None:
    line = [SCRIPT, "-n", "2", "--runs", "1", "-m", "topk density=0.1", "--elements", "1200", "--out", str(tmp_path)]
    done = subprocess.run(line, env=untraced(), capture_output=True, text=True, timeout=110, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    by = results.load("ring", tmp_path).set_index("way")
    assert max(by.error["MPI"], by.error["fp32"]) < 1e-6 < by.error["fp16"] < 1e-2 < by.error["topk density=0.1"] < 1


def test_a_wrong_number_of_ranks() -> None:
    wrong = subprocess.run([SCRIPT, "-n", "x"], capture_output=True, text=True, timeout=20)
    assert wrong.returncode == 1 and "not a number of ranks" in wrong.stderr
