"""The MPI driver when a rank is killed, alone, and in the example; see ``test_promises_mpi.py`` for all else."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import environment, launch

pytest.importorskip("mpi4py")
pytestmark = pytest.mark.parallel

HERE = Path(__file__).parent


@pytest.mark.timeout(150)
def test_a_killed_rank_ends_the_others(tmp_path: Path) -> None:
    began = time.monotonic()
    done = launch("mpirun-2", HERE / "mpi_killed.py", str(tmp_path), seconds=120)
    assert done.returncode != 0
    assert (tmp_path / "before").exists(), done.stdout[-3000:]
    assert not (tmp_path / "survivor").exists(), "the other rank went on as if nothing had happened"
    assert time.monotonic() - began < 60


@pytest.mark.timeout(60)
def test_it_can_be_imported_alone() -> None:
    """Without mpirun, and with nothing on the PATH that could start a daemon."""
    done = subprocess.run(
        [sys.executable, "-c", "from hvdcompress.mpi import Compressor; print(Compressor('topk').allreduce)"],
        env={"PATH": "/nonexistent", "PYTHONPATH": str(HERE.parents[1])},
        capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "allreduce" in done.stdout, done.stdout + done.stderr


@pytest.mark.timeout(150)
def test_the_example_converges() -> None:
    done = launch("mpirun-2", HERE.parents[1] / "examples" / "mpi_numpy.py", seconds=120)
    said = re.search(r"^2 ranks, error ([\d.]+)%, ([\d.]+) times fewer bytes than dense$", done.stdout, re.MULTILINE)
    assert done.returncode == 0 and said, done.stdout
    assert float(said[1]) < 2 and float(said[2]) > 10


def test_an_import_changes_nothing_of_the_process() -> None:
    """But that MPI starts, as with mpi4py's own import; without a launcher, too."""
    program = (
        "import logging, os, signal, threading\n"
        "import numpy as np\n"
        "def settings():\n"
        "    handlers = [signal.getsignal(number) for number in signal.valid_signals()]\n"
        "    return dict(os.environ), np.geterr(), handlers, threading.enumerate(), logging.root.handlers\n"
        "before = settings()\n"
        "import hvdcompress.mpi\n"
        "assert settings() == before and hvdcompress.mpi.Compressor('none').allreduce(np.ones(3), 'w').sum() == 3\n"
    )
    alone = environment("alone")
    done = subprocess.run([sys.executable, "-c", program], env=alone, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
