"""What it costs to adapt the optimizer's momentum: time and memory of one rank, for the gradients of an MLP."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np
import pandas as pd

from experiments.momentum.contenders import METHODS
from experiments.report.results import copy_speed
from hvdcompress.engine.telemetry.observer import Observer
from hvdcompress.loopback import Loopback
from hvdcompress.optimizers import SGD

SHAPES = {"0.weight": (2048, 784), "2.weight": (2048, 2048), "4.weight": (10, 2048)}
WARM, STEPS = 5, 15


class Clock(Observer):
    """Keeps the seconds in which rank 0 handed over each step's result."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def decoded(self, rank: int, name: str, seconds: float) -> None:
        """Add a bucket's seconds to the step's."""
        if rank == 0:
            self.seconds[-1] += seconds


def measure(methods: Sequence[str], world_size: int) -> pd.DataFrame:
    """Return a table: seconds of handing over, in copies of the gradients, and the memory that is kept for it.

    Both forms of a method take turns, step by step.

    Raises:
        ValueError: a method does not exist.
    """
    rng = np.random.default_rng(0)
    gradients = [
        {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
        for _ in range(world_size)
    ]
    num_bytes = sum(gradient.nbytes for gradient in gradients[0].values())
    rows = []
    for name in methods:
        settings = METHODS.get(name, {"method": name})
        nets = [Loopback(settings, world_size, optimizer=SGD(0.9), optimizer_momentum=how) for how in ("keep", "adapt")]
        clocks = [Clock(), Clock()]
        for net, clock in zip(nets, clocks, strict=True):
            net.watch(clock)
        copies = []
        for _ in range(WARM + STEPS):
            for net, clock in zip(nets, clocks, strict=True):
                clock.seconds.append(0.0)
                net.allreduce_many(gradients)
            copies.append(num_bytes / copy_speed(num_bytes // 4, 1) / 1e9)  # into memory that is new
        copy = statistics.median(copies)
        keep, adapt = (statistics.median(clock.seconds[WARM:]) / copy for clock in clocks)
        memory = (_state(nets[1]) - _state(nets[0])) / 1e6
        rows.append({"method": name, "kept, copies": keep, "adapted, copies": adapt, "memory, MB": memory})
    return pd.DataFrame(rows)


def _state(net: Loopback) -> int:
    """Return the bytes of rank 0's state, without what a step alone needs."""
    local = net.ranks[0]
    for memory in local.memory.values():
        memory.clear_scratch()
    return local.num_state_bytes()
