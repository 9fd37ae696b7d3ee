"""Run by every rank: in its fourth step the last rank is stopped, or does not take part; the watchdog must say so.

``python stuck.py OUT HOW`` with ``DOOR`` in the environment. HOW: ``stopped`` and ``absent``, in the fourth step;
``new``, it does not come to where ranks meet for the first time; ``number``, nor to where those of an elastic training
make their Compressors; ``late``, it comes to its first step after two and a half timeouts.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from pathlib import Path

from run_door import door_of

faulthandler.dump_traceback_later(100, exit=True)
out, how = Path(sys.argv[1]), sys.argv[2]
door = door_of(os.environ["DOOR"], out)
timeout = 1 if how in ("new", "number") else 6


def wait() -> None:
    """The last rank's part."""
    if door.rank == door.world - 1:
        (out / "before").touch()
        if how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            time.sleep(2.5 * timeout if how == "late" else 100)


if how == "number":
    os.environ["HOROVOD_ELASTIC"] = "1"
makes_together = how == "number" or (how == "new" and door.name == "mpi")
if makes_together:
    wait()
handle = door.make("scalecom", {"density": 0.05, "timeout": timeout}, door.shapes)
for step in range(4):
    if step == (0 if how in ("new", "late") else 3) and not makes_together:
        wait()
    handle.reduce(door.gradients(step, door.shapes))
(out / f"survivor-{door.rank}").touch()
