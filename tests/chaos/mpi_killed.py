"""Run by several ranks: rank 1 is killed in the middle of a step, and the others must not wait for it for ever."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from pathlib import Path

import numpy as np

from hvdcompress.mpi import Compressor  # before mpi4py, whose environment it sets

from mpi4py import MPI  # isort: skip

faulthandler.dump_traceback_later(90, exit=True)
out = Path(sys.argv[1])
comp = Compressor("scalecom", MPI.COMM_WORLD, density=0.1, nodes=int(os.environ.get("NODES", "0")))
for step in range(5):
    if step == 3 and MPI.COMM_WORLD.rank == 1:
        (out / "before").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    comp.allreduce(np.full((64, 64), step, np.float32), name="w")
(out / "survivor").touch()
