"""The import of the MPI driver, without mpirun."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests import ROOT

PROGRAM = """
import logging, os, signal, threading
import numpy as np

def settings():
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    return dict(os.environ), np.geterr(), handlers, threading.enumerate(), logging.root.handlers

before = settings()
import hvdcompress.mpi
assert settings() == before
assert hvdcompress.mpi.Compressor("none").allreduce(np.ones(3), "w").sum() == 3
"""


@pytest.mark.timeout(60)
def test_an_import_needs_no_launcher_and_changes_nothing_in_the_process() -> None:
    """With nothing on the PATH that could start a daemon. MPI itself is initialized, as with mpi4py's own import."""
    env = {"PATH": "/nonexistent", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
