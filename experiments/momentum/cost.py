"""What it costs to adapt the optimizer's momentum: time and memory of one rank, for the gradients of an MLP."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pandas as pd

from experiments.momentum.contenders import METHODS
from hvdcompress.engine.telemetry.observer import Observer
from hvdcompress.loopback import Loopback
from hvdcompress.optimizers import SGD

SHAPES = {"0.weight": (2048, 784), "2.weight": (2048, 2048), "4.weight": (10, 2048)}
WARM, STEPS = 5, 15


class Clock(Observer):
    """Adds up the seconds of handing over, by rank 0."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def decoded(self, rank: int, name: str, seconds: float) -> None:
        """Take a bucket's seconds."""
        if rank == 0:
            self.seconds += seconds


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
    size = sum(gradient.size for gradient in gradients[0].values())
    rows = []
    for name in methods:
        settings = METHODS.get(name, {"method": name})
        nets = {
            how: Loopback(settings, world_size, optimizer=SGD(0.9), optimizer_momentum=how) for how in ("keep", "adapt")
        }
        clocks = {how: Clock() for how in nets}
        for how, net in nets.items():
            net.watch(clocks[how])
        found: dict[str, list[float]] = defaultdict(list)
        for _ in range(WARM + STEPS):
            for how, net in nets.items():
                clocks[how].seconds = 0.0
                net.allreduce_many(gradients)
                found[how].append(clocks[how].seconds)
            found["copy"].append(_copy(size))
        times = {what: statistics.median(each[WARM:]) for what, each in found.items()}
        state = {how: _state(net) for how, net in nets.items()}
        rows.append(
            {
                "method": name,
                "kept, copies": times["keep"] / times["copy"],
                "adapted, copies": times["adapt"] / times["copy"],
                "memory, MB": (state["adapt"] - state["keep"]) / 1e6,
            }
        )
    return pd.DataFrame(rows)


def _copy(size: int) -> float:
    source, target = np.ones(size, np.float32), np.zeros(size, np.float32)
    began = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - began


def _state(net: Loopback) -> int:
    """Return the bytes of rank 0's state, without what a step alone needs."""
    local = net.ranks[0]
    for memory in local.memory.values():
        memory.clear_scratch()
    return local.num_state_bytes()
