"""Run by every rank: in its fourth step the last rank is stopped, or does not take part; the watchdog must say so.

``python stuck.py OUT stopped|absent|new`` with ``DOOR`` in the environment; new: not even in the first.
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
handle = door.make("scalecom", {"density": 0.05, "timeout": 6}, door.shapes)
for step in range(4):
    if step == (0 if how == "new" else 3) and door.rank == door.world - 1:
        (out / "before").touch()
        if how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            time.sleep(100)
    handle.reduce(door.gradients(step, door.shapes))
(out / "survivor").touch()
