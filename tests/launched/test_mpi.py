"""The example of the MPI driver."""

from __future__ import annotations

import re

import pytest

from tests import ROOT
from tests.launching import launch

pytest.importorskip("mpi4py")


@pytest.mark.timeout(150)
def test_the_example_converges() -> None:
    done = launch("mpirun-2", ROOT / "examples" / "mpi_numpy.py", seconds=120)
    said = re.search(r"^2 ranks, error ([\d.]+)%, ([\d.]+) times fewer bytes than dense$", done.stdout, re.MULTILINE)
    assert done.returncode == 0 and said, done.stdout
    assert float(said[1]) < 2 and float(said[2]) > 10
