"""Run by every rank: in its fourth step the last rank is stopped, or does not take part; the watchdog must say so.

``python stuck.py OUT HOW`` with ``DRIVER`` in the environment. HOW: ``stopped`` and ``absent``, in the fourth step;
``continued``, it is stopped there for some seconds;
``ended``, it ends there as if all was done; ``new``, it does not come to where ranks meet for the first time;
``number``, nor to where those of an elastic training make their Compressors; ``late``, it comes late to its first step.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.launched.run_promises import driver_of

faulthandler.dump_traceback_later(100, exit=True)
out, how = Path(sys.argv[1]), sys.argv[2]
driver = driver_of(os.environ["DRIVER"], out)
limits = {"new": (1, 10), "number": (1, 10), "late": (3, 60), "continued": (3, 60), "ended": (120, 1800)}
warn_after, end_after = limits.get(how, (3, 12))


def wait() -> None:
    """The last rank's part."""
    if driver.rank == driver.world_size - 1:
        (out / "before").touch()
        if how == "continued":
            subprocess.Popen(["sh", "-c", f"sleep 5; kill -CONT {os.getpid()}"])
        if how in ("stopped", "continued"):
            os.kill(os.getpid(), signal.SIGSTOP)
        elif how == "ended":
            sys.exit(0)
        else:
            time.sleep(8 if how == "late" else 100)


if how == "number":
    os.environ["HOROVOD_ELASTIC"] = "1"
makes_together = how == "number" or (how == "new" and driver.name == "mpi")
if makes_together:
    wait()
handle = driver.make("scalecom", {"density": 0.05, "warn_after": warn_after, "end_after": end_after}, driver.shapes)
for step in range(4):
    if step == (0 if how in ("new", "late") else 3) and not makes_together:
        wait()
    handle.reduce(driver.gradients(step, driver.shapes))
(out / f"survivor-{driver.rank}").touch()
