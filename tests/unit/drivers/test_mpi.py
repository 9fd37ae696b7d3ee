"""What the import of the MPI driver needs and changes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests import ROOT
from tests.launching import environment


@pytest.mark.timeout(60)
def test_it_can_be_imported_alone() -> None:
    """Without mpirun, and with nothing on the PATH that could start a daemon."""
    done = subprocess.run(
        [sys.executable, "-c", "from hvdcompress.mpi import Compressor; print(Compressor('topk').allreduce)"],
        env={"PATH": "/nonexistent", "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "allreduce" in done.stdout, done.stdout + done.stderr


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
