"""Run by every rank of a launch in which some ranks have a fault: ``python faulty.py OUT FAULT``.

``DRIVER`` in the environment names the driver. The ranks take four steps. A rank that gets to the end writes
OUT/survivor-RANK; a rank whose step raises writes OUT/error-RANK. The last rank has the fault before its fourth step,
unless noted otherwise; with ``FAULTY`` in the environment, so many of the last ranks have it:

    killed      SIGKILL
    stopped     SIGSTOP
    continued   SIGSTOP, and SIGCONT some seconds later
    absent      sleeps, outside of a step
    ended       ends with status 0
    joined      calls ``hvd.join()``
    late        comes late to the first step
    new         never comes to the first rendezvous
    elastic     the same in an elastic training, whose ranks meet when they make their Compressors
    error, exit, interrupt   raises this in the backward pass (DDP)
"""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from hvdcompress.engine.safety import peers, watchdog
from tests.ranks.drivers import driver_of

RAISED = {"error": ValueError("made by the test"), "exit": SystemExit(3), "interrupt": KeyboardInterrupt()}
#: fault -> ``warn_after`` and ``end_after`` in seconds; other faults are noticed without waiting for so long
LIMITS = dict.fromkeys(("stopped", "absent", "new", "elastic"), (1, 5)) | {"late": (1, 60), "continued": (1, 60)}


def have_fault(handle: Any) -> None:
    """Have the fault on this rank."""
    (out / f"before-{driver.rank}").write_text(str(os.getpid()))
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault in ("stopped", "continued"):
        if fault == "continued":
            subprocess.Popen(["sh", "-c", f"sleep 2.5; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "ended":
        sys.exit(0)
    elif fault == "joined":
        import horovod.torch as hvd

        hvd.join()
    elif fault in RAISED:
        handle.model.module.a.register_hook(raise_in_backward)  # the last gradient; two buckets come before it
    else:
        time.sleep(3 if fault == "late" else 90)


def raise_in_backward(_: Any) -> None:
    raise RAISED[fault]


faulthandler.dump_traceback_later(100, exit=True)
out, fault = Path(sys.argv[1]), sys.argv[2]
if fault in LIMITS or fault == "ended":  # the watchdog ends the ranks
    watchdog.TICK = 0.1
    watchdog.LIVENESS_INTERVAL = 0.5
    watchdog.GRACE_PERIOD = 1.5
    peers.MESSAGE_TIMEOUT = watchdog.MESSAGE_TIMEOUT = 1.0
driver = driver_of(os.environ["DRIVER"], out)
is_faulty = driver.rank >= driver.world_size - int(os.environ.get("FAULTY", "1"))
if fault == "elastic":
    os.environ["HOROVOD_ELASTIC"] = "1"
first_step = {"late": 0, "new": 0, "elastic": -1}.get(fault, 3)
if fault == "new" and driver.name == "mpi":
    first_step = -1  # these ranks meet when they make their Compressors
if is_faulty and first_step < 0:
    have_fault(None)
warn_after, end_after = LIMITS.get(fault, (120, 1800))
settings = {"density": 0.05, "warn_after": warn_after, "end_after": end_after}
handle = driver.make("randomk", settings, driver.shapes)
for step in range(4):
    if step == first_step and is_faulty:
        have_fault(handle)
    gradients = dict(sorted(driver.gradients(step, driver.shapes).items()))  # in the same order on all ranks
    began = time.monotonic()
    try:
        handle.reduce(gradients)
    except Exception as error:
        (out / f"error-{driver.rank}").write_text(f"{time.monotonic() - began:.1f} {error}")
        raise
(out / f"survivor-{driver.rank}").touch()
