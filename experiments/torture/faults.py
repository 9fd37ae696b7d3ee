"""Which faults there are, and one launch with one of them: drawn whole from one number.

The driver and the fault of case ``s`` go round with s, so that N cases in a row cover all pairs evenly; all else is
drawn from s alone. A driver and a fault by name therefore reproduce a case whatever else was asked for.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["DRIVERS", "FAULTS", "INJECTED", "STEPS", "Case", "Fault", "chosen"]

DRIVERS = ("mpi", "ddp", "torch", "tensorflow")
CATCHING = ("mpi", "ddp")  #: drivers whose Compressors can be used again after an error
STEPS = 12  #: of a training
SAVE_EVERY = 3  #: steps
INJECTED = "torture: raised on purpose"

#: what keeps all that was given, in residuals, under the settings of :meth:`Case.settings`
METHODS = ("topk", "scalecom", "gaussiank", "randomk", "gtopk", "powersgd")


@dataclass(frozen=True)
class Fault:
    """One kind of fault.

    Attributes:
        about: what happens, for tables.
        recovers: whether a training may go on to its end, with nothing lost.
        ends: what the error must say where the training ends instead, a regular expression; empty: it must not end.
    """

    about: str
    recovers: bool
    ends: str


KILLED = r"signal 9|SIGKILL|exitcode\s*: -9|PeerLost|does not answer"
FAULTS: dict[str, Fault] = {
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
}
#: faults that never let a training go on, by driver: DDP compares parameters by their order
ENDS_AT = {("order", "ddp")}


@dataclass(frozen=True)
class Case:
    """One launch.

    Attributes:
        seed: what it is drawn from.
        driver: of :data:`DRIVERS`.
        fault: of :data:`FAULTS`.
        ranks: their number, 2 to 4.
        victim: the rank that has the fault.
        step: the step of the fault; ranks that go on would not have ended by then.
        method: a method's id.
        apart: whether each tensor is exchanged by itself.
        catches: whether the script catches errors of a save or a step, and goes on until two steps in a row fail.
        moment: where in the step, 0 to 1.
        seconds: how long a rank is stopped or late.
    """

    seed: int
    driver: str
    fault: str
    ranks: int
    victim: int
    step: int
    method: str
    apart: bool
    catches: bool
    moment: float
    seconds: float

    @classmethod
    def drawn(cls, seed: int, drivers: Sequence[str] = DRIVERS, faults: Sequence[str] = tuple(FAULTS)) -> Case:
        """The case of ``seed`` among these drivers and faults."""
        driver, fault = drivers[seed % len(drivers)], faults[seed // len(drivers) % len(faults)]
        rng = np.random.default_rng(seed)
        ranks = int(rng.choice([2, 2, 3, 4]))
        victim, step = int(rng.integers(ranks)), int(rng.integers(2, STEPS - 3))
        method, apart, catches = str(rng.choice(METHODS)), bool(rng.integers(2)), bool(rng.integers(2))
        moment, seconds = round(float(rng.random()), 3), round(float(rng.uniform(0.5, 2.5)), 2)
        return cls(
            seed, driver, fault, ranks, victim, step, method, apart, catches and driver in CATCHING, moment, seconds
        )

    @property
    def settings(self) -> dict[str, Any]:
        """The Compressor's settings: a plain residual, and a watchdog that does not wait long."""
        kept = {} if self.method == "powersgd" else {"density": 0.05}
        joined = {"bucket_elements": 0} if self.apart else {}
        return {**kept, **joined, "feedback": "plain", "min_elements": 0, "end_after": 20}

    @property
    def can_recover(self) -> bool:
        """Whether the training may go on to its end."""
        return FAULTS[self.fault].recovers and (self.fault, self.driver) not in ENDS_AT

    @property
    def can_end(self) -> bool:
        """Whether the training may end with an error."""
        return bool(FAULTS[self.fault].ends) and not (self.catches and self.can_recover)

    @property
    def pause(self) -> float:
        """Seconds for which the fault itself holds the training up."""
        return self.seconds if self.fault in ("paused", "late") else 0.0

    @property
    def command(self) -> str:
        """The command line that runs this case again."""
        return f"python -m experiments torture --driver {self.driver} --only {self.fault} --seed {self.seed} --faults 1"

    def write(self, folder: Path) -> None:
        """Write it for the ranks."""
        (folder / "case.json").write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Case:
        """What :meth:`write` wrote."""
        return cls(**json.loads((folder / "case.json").read_text(encoding="utf-8")))


def chosen(words: Sequence[str], known: Sequence[str], what: str) -> list[str]:
    """The words, or all that are known if there are none.

    Raises:
        ValueError: one is not known.
    """
    for word in words:
        if word not in known:
            raise ValueError(f"{what} {word!r} is not known; known: {', '.join(known)}")
    return list(words or known)
