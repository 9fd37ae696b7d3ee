"""Faults, and cases: a case is one short training with one fault, drawn as a whole from one number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

DRIVERS = ("mpi", "ddp", "torch", "tensorflow")
RECOVERING = ("mpi", "ddp")  #: drivers whose Compressors can be used again after an error
STEPS = 12  #: of a training
SAVE_EVERY = 3  #: steps
SHAPES = {"w": (48, 64), "b": (64,), "v": (32, 48)}
INJECTED = "torture: raised on purpose"
METHODS = ("topk", "scalecom", "gaussiank", "randomk", "gtopk", "powersgd")  #: with plain feedback they lose nothing
WITH_HEADER = ("topk", "gaussiank")  #: methods that gather payloads with a header


@dataclass(frozen=True)
class Fault:
    """One kind of fault.

    Attributes:
        about: what happens, for tables.
        recovers: whether a training may continue to its end, with nothing lost.
        error: a regular expression that the error must match if the training ends; empty if it must not end.
    """

    about: str
    recovers: bool
    error: str


KILLED = r"signal 9|SIGKILL|exitcode\s*: -9|PeerLost|does not answer"
FAULTS = {
    "killed": Fault("SIGKILL in a step", False, KILLED),
    "killed_saving": Fault("SIGKILL while saving", False, KILLED),
    "paused": Fault("SIGSTOP, and SIGCONT after 0.5 to 2.5 s", True, ""),
    "compress": Fault("an exception in compress", True, INJECTED),
    "decode": Fault("an exception in decode", True, INJECTED),
    "optimizer": Fault("an exception in the optimizer", False, INJECTED),
    "nan": Fault("a NaN in a gradient", True, ""),
    "disk": Fault("a full disk while saving", True, "cannot save the state"),
    "late": Fault("a rank that starts 0.5 to 2.5 s late", True, ""),
    "plan": Fault("a rank with another plan", False, r"density|plan"),
    "order": Fault("parameters in another order", True, r"order|shape|same model|parameter"),
    "garbage": Fault("a payload with a damaged header", True, "payload"),
}


@dataclass(frozen=True)
class Case:
    """One training with one fault.

    Attributes:
        seed: the number that all other fields are drawn from.
        driver: one of :data:`DRIVERS`.
        fault: one of :data:`FAULTS`.
        world_size: number of ranks, 2 to 4.
        victim: the rank that has the fault.
        step: the step of the fault.
        method: id of the method.
        separate: whether each tensor is exchanged by itself, without buckets.
        catches: whether the script catches errors of a step or a save, until two steps in a row have failed.
        moment: when in the step the fault comes, 0 to 1.
        delay: seconds for which a rank is stopped or late.
    """

    seed: int
    driver: str
    fault: str
    world_size: int
    victim: int
    step: int
    method: str
    separate: bool
    catches: bool
    moment: float
    delay: float

    @classmethod
    def drawn(cls, seed: int, drivers: Sequence[str] = DRIVERS, faults: Sequence[str] = tuple(FAULTS)) -> Case:
        """Return the case of a seed.

        Drivers and faults take turns as the seed increases, so that consecutive seeds try all pairs equally often. The
        other fields depend on the seed alone: the same driver, fault and seed always give the same case.
        """
        driver, fault = drivers[seed % len(drivers)], faults[seed // len(drivers) % len(faults)]
        rng = np.random.default_rng(seed)
        world_size = int(rng.choice([2, 2, 3, 4]))
        victim, step = int(rng.integers(world_size)), int(rng.integers(2, STEPS - 3))
        method, separate, catches = str(rng.choice(METHODS)), bool(rng.integers(2)), bool(rng.integers(2))
        moment, delay = round(float(rng.random()), 3), round(float(rng.uniform(0.5, 2.5)), 2)
        if fault == "garbage":
            method = WITH_HEADER[seed % len(WITH_HEADER)]
        catches &= driver in RECOVERING
        return cls(seed, driver, fault, world_size, victim, step, method, separate, catches, moment, delay)

    @property
    def settings(self) -> dict[str, Any]:
        """The Compressor's settings: plain feedback, and a watchdog that does not wait long."""
        density = {} if self.method == "powersgd" else {"density": 0.05}
        buckets = {"bucket_elements": 0} if self.separate else {}
        return {**density, **buckets, "feedback": "plain", "min_elements": 0, "end_after": 20}

    @property
    def may_recover(self) -> bool:
        """Whether the training may continue to its end."""
        compared = (self.fault, self.driver) == ("order", "ddp")  # DDP compares parameters by their order
        return FAULTS[self.fault].recovers and not compared

    @property
    def may_end(self) -> bool:
        """Whether the training may end with an error."""
        return bool(FAULTS[self.fault].error) and not (self.catches and self.may_recover)

    @property
    def pause(self) -> float:
        """Seconds for which the fault itself delays the training."""
        return self.delay if self.fault in ("paused", "late") else 0.0

    @property
    def command(self) -> str:
        """The command that runs this case again."""
        return f"python -m tests.chaos --driver {self.driver} --only {self.fault} --seed {self.seed} --faults 1"
