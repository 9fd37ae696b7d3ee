"""The commands of one rank of a benchmark: set contenders up, and measure one exchange at a time.

An exchange is measured from the call of ``backward()``, which only hands out gradients that exist already, last layer
first, or of the MPI driver with arrays, until all gradients are reduced. So no part of it is hidden behind computing,
as a part would be in a training.
"""

from __future__ import annotations

import gc
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from experiments.bench.clock import Clock
from experiments.bench.contenders import OverDDP, OverHorovod, OverMPI
from experiments.bench.gradients import make_gradients
from experiments.training import gradients as saved

__all__ = ["Exchanges"]


class Set:
    """The gradients of one set on this rank, by step."""

    def __init__(self, given: dict[str, Any], rank: int, device: str):
        self.label, self.tensors = given["label"], given["tensors"]
        if given["gradients"]:
            steps = saved.load(Path(given["gradients"]))
            self.steps = [
                [torch.from_numpy(ranks[rank % len(ranks)][name].astype("float32")) for name in self.tensors]
                for ranks in steps
            ]
        else:
            first = make_gradients(self.tensors, rank)
            self.steps = [first, [gradient.flip(0) for gradient in first]]  # not the same twice in a row
        self.steps = [[gradient.to(device) for gradient in step] for step in self.steps]


class Exchanges:
    """One rank's contenders, and the commands of the process that measures.

    Args:
        rank: this rank.
        make: the contenders' class.
        meet: returns when all ranks have called it.
        clock: the contenders'.
        device: where gradients are, "cpu" or "cuda".
    """

    def __init__(
        self,
        rank: int,
        make: type[OverHorovod | OverDDP | OverMPI],
        meet: Callable[[], Any],
        clock: Clock,
        device: str = "cpu",
    ):
        self.rank, self.make, self.meet, self.clock, self.device = rank, make, meet, clock, device
        self.wait: Callable[[], Any] = torch.cuda.synchronize if device == "cuda" else lambda: None
        self.set: Set | None = None
        self.contenders: dict[str, OverHorovod | OverDDP | OverMPI] = {}
        self.step = 0

    def prepare(self, command: dict[str, Any]) -> dict[str, Any]:
        """Set a contender up and warm it up, if that is not done; contenders of another set are forgotten."""
        if self.set is None or self.set.label != command["set"]["label"]:
            for key in list(self.contenders):
                self.forget({"key": key})
            self.set = Set(command["set"], self.rank, self.device)
        key = command["key"]
        if key not in self.contenders:
            self.contenders[key] = self.make(key, self.set.tensors, command["contender"], self.clock, self.device)
            for _ in range(command["contender"]["warm_up"]):
                self.measure({"key": key})
        return {}

    def measure(self, command: dict[str, Any]) -> dict[str, Any]:
        """Measure one exchange: when it began and ended, how its time was spent, and its bytes."""
        assert self.set
        contender = self.contenders[command["key"]]
        contender.take()  # what the last exchange left
        contender.ledger.reset()
        self.clock.reset()
        self.step += 1
        go = contender.prepare(self.set.steps[self.step % len(self.set.steps)])
        self.wait()
        self.meet()
        self.clock.spent["blocked"] = 0.0
        start = time.monotonic()  # one clock for all ranks: their hosts are on one machine
        go()
        self.wait()
        end = time.monotonic()
        ledger = contender.ledger
        counted = {"sent": ledger.bytes_sent(), "on_wire": ledger.bytes_on_wire(), "calls": ledger.collectives()}
        return {
            "start": start,
            "end": end,
            "dense": ledger.dense_bytes(),
            **(self.clock.spent if contender.splits else {}),
            **(counted if contender.counts else {}),
        }

    def check(self, command: dict[str, Any]) -> dict[str, Any]:
        """A checksum of the reduced gradients, which must be equal on all ranks."""
        total, reduced = 0, self.contenders[command["key"]].take()
        assert self.set and len(reduced) == len(self.set.tensors), "a gradient is missing"
        for gradient in reduced:
            total = zlib.crc32(gradient.cpu().contiguous().numpy().reshape(-1).view("uint8"), total)
        return {"checksum": total}

    def forget(self, command: dict[str, Any]) -> dict[str, Any]:
        """Forget a contender, as memory is needed."""
        if contender := self.contenders.pop(command["key"], None):
            contender.forget()
        gc.collect()  # Horovod's hooks and their optimizers hold each other
        return {}
