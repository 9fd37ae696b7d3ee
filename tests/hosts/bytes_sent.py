"""Measure what ranks on emulated hosts send, by their ledgers and by the interfaces. Run by every rank:

    launch/hosts.sh --hosts 2 -- mpirun -H host0:1,host1:1 python tests/hosts/bytes_sent.py OUT DRIVER CASE…

CASE is a method with settings in JSON, such as ``["topk", {"density": 0.05}]``. Each rank writes OUT/RANK.json: a list
with the figures of each case, and of a second in which only the framework itself sends.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from experiments.cluster.hosts import _sent
from tests.ranks.drivers import driver_of

SHAPES = {"weight": (1000, 600)}
WARM_UP, STEPS = 3, 4

out = Path(sys.argv[1])
driver = driver_of(sys.argv[2], out)


def sent() -> int:
    """Return the bytes that have left this host so far."""
    driver.meet()
    return _sent("qdisc", "show", "dev", "eth0")


def measure(method: str, settings: dict[str, Any]) -> dict[str, float]:
    """Return the figures of STEPS steps."""
    handle = driver.make(method, settings, SHAPES)
    gradients = [driver.gradients(step, SHAPES) for step in range(2)]
    for step in range(WARM_UP):  # the first compares plans, compiles kernels and fills Horovod's caches
        handle.reduce(gradients[step % 2])
    ledger = handle.compressor.ledger
    first_sent = sent()
    on_wire, collectives, began = ledger.bytes_on_wire(), ledger.collectives(), time.monotonic()
    for step in range(STEPS):
        handle.reduce(gradients[step % 2])
    interface = sent() - first_sent
    seconds = time.monotonic() - began
    handle.close()
    return {
        "ledger": ledger.bytes_on_wire() - on_wire,
        "collectives": ledger.collectives() - collectives,
        "interface": interface,
        "seconds": seconds,
    }


found = [measure(*json.loads(case)) for case in sys.argv[3:]]
before = sent()
time.sleep(1.0)
found.append({"interface": sent() - before})
(out / f"{driver.rank}.json").write_text(json.dumps(found), encoding="utf-8")
