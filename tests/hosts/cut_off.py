"""Run by every rank on emulated hosts: take steps until a link is cut. ``python cut_off.py FOLDER``

FOLDER/three-steps is written after three steps. Each rank writes its errors to FOLDER/errors-RANK, because mpirun's own
connections are cut, too.
"""

from __future__ import annotations

import faulthandler
import itertools
import os
import sys
from pathlib import Path

from tests.ranks.drivers import driver_of

faulthandler.dump_traceback_later(100, exit=True)
out = Path(sys.argv[1])
driver = driver_of("mpi", out)
os.dup2(os.open(out / f"errors-{driver.rank}", os.O_WRONLY | os.O_CREAT), 2)
handle = driver.make("scalecom", {"density": 0.05, "warn_after": 0, "end_after": 12}, driver.shapes)
for step in itertools.count():
    handle.reduce(driver.gradients(step, driver.shapes))
    if step == 3:
        (out / "three-steps").touch()
