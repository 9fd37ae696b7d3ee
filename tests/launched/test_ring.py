"""The ring over MPI."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launching import launch

pytest.importorskip("mpi4py")


@pytest.mark.parametrize("world_size", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_the_ring_over_mpi_equals_the_simulated_one(world_size: int) -> None:
    done = launch(f"mpirun-{world_size}", Path(__file__).with_name("ring_ranks.py"), seconds=100)
    assert done.returncode == 0, done.stdout + done.stderr
