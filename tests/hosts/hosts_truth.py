"""What ranks on emulated hosts count, and what their interfaces really send. Every rank runs this script:

    launch/hosts.sh --hosts 2 -- mpirun -H host0:1,host1:1 python tests/hosts/hosts_truth.py FOLDER METHOD…

Each rank writes FOLDER/RANK.json: for each METHOD (``id`` or ``id:field=value``) the ledger's `bytes_on_wire` and
collectives, the bytes that left the interface, and seconds; for "idle" what left it while only Horovod itself sent.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

torch.set_num_threads(1)
import horovod.torch as hvd  # noqa: E402  (it starts threads)

from experiments.cluster.hosts import _sent  # noqa: E402
from hvdcompress.horovod.torch import Compressor  # noqa: E402

ELEMENTS, WARM_UP, STEPS = 600_000, 3, 8


def meet() -> None:
    """Every rank is here."""
    hvd.allreduce(torch.zeros(1), name="meet")


def measure(method: str) -> dict[str, float]:
    """STEPS steps of the stock optimizer with one gradient of ELEMENTS numbers."""
    name, _, fields = method.partition(":")
    options = {key: float(value) for key, _, value in (field.partition("=") for field in fields.split(",") if field)}
    weight = torch.nn.Parameter(torch.zeros(ELEMENTS))
    compressor = Compressor(name, [("weight", weight)], **options)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=[("weight", weight)], compression=compressor)
    generator = torch.Generator().manual_seed(hvd.rank())
    gradients = [torch.randn(ELEMENTS, generator=generator) for _ in range(2)]

    def step(number: int) -> None:
        optimizer.zero_grad()
        (weight * gradients[number % 2]).sum().backward()
        optimizer.step()

    for number in range(WARM_UP):  # the first compares plans, compiles kernels and fills Horovod's caches
        step(number)
    meet()
    ledger, count = compressor.ledger.bytes_on_wire(), compressor.ledger.collectives()
    sent, began = _sent("qdisc", "show", "dev", "eth0"), time.monotonic()
    for number in range(STEPS):
        step(number)
    meet()
    seconds = time.monotonic() - began
    return {
        "ledger": compressor.ledger.bytes_on_wire() - ledger,
        "collectives": compressor.ledger.collectives() - count,
        "sent": _sent("qdisc", "show", "dev", "eth0") - sent,
        "seconds": seconds,
    }


def idle(seconds: float = 1.0) -> dict[str, float]:
    """Horovod alone: its ranks ask each other in every cycle whether there is something to do."""
    meet()
    sent, began = _sent("qdisc", "show", "dev", "eth0"), time.monotonic()
    time.sleep(seconds)
    return {"sent": _sent("qdisc", "show", "dev", "eth0") - sent, "seconds": time.monotonic() - began}


hvd.init()
found = {method: measure(method) for method in sys.argv[2:]}
found["idle"] = idle()
Path(sys.argv[1], f"{hvd.rank()}.json").write_text(json.dumps(found), encoding="utf-8")
