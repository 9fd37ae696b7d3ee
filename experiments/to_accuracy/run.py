"""Start ranks for trainings and for timings. Results are kept as those of other units of work are.

A record of a training has ``evaluations`` [step, seconds, score]; one of a timing has ``milliseconds`` of each step of
each turn of one contender, and those of rank 0 on a ``processor``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.cluster import launch
from experiments.momentum.contenders import without_rate
from experiments.to_accuracy.races import RACES
from experiments.units import Unit, measure

MODULE = "experiments.to_accuracy.rank"
TIMEOUT = 1800.0  #: seconds of one launch
Record = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """What trains, and where results are kept.

    Attributes:
        folder: gets the results.
        driver: "ddp" or "horovod".
        device: "cpu", or "cuda" for one GPU that all ranks share.
    """

    folder: Path
    driver: str = "ddp"
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.device == "cuda" and self.driver != "ddp":
            raise ValueError("--device cuda: only DDP trains on a GPU here")

    def measured(self, labels: Record, **more: Any) -> list[Record]:
        """Return the records of a launch of all ranks, which is made unless its results are kept.

        Args:
            labels: of the records: the "kind", "train" or "time"; the "race"; the "rate" of the links of emulated hosts
                (None for none); and others.
            more: what the ranks need to know besides.
        """
        labels = {**labels, "driver": self.driver, "device": self.device}
        race = RACES[labels["race"]]
        settings = {"given": {**labels, **more}, "race": {**vars(race), "task": race.task.model_dump()}}
        return measure([Unit(start, settings, labels)], self.folder, 1)[0]


def start(given: Record, race: Record) -> list[Record]:
    """Start all ranks of a race, on emulated hosts if there is a ``rate``, and return what they measured.

    Args:
        given: what the ranks are told.
        race: all settings of the race, which the results depend on.

    Raises:
        LaunchError: the ranks failed; the message has the end of their output.
        HostsError: emulated hosts cannot be set up.
    """
    driver: launch.Driver = "ddp" if given["driver"] == "ddp" else "gloo"
    return launch.records(["-m", MODULE, json.dumps(given)], race["ranks"], driver, rate=given["rate"], timeout=TIMEOUT)


# -- trainings ----------------------------------------------------------------------------------------------


def train_all(setting: Setting, races: Sequence[str], contenders: Sequence[str], seeds: Sequence[int]) -> None:
    """Train what has no result yet.

    Raises:
        LaunchError, HostsError: see :func:`start`.
        Stopped: Ctrl-C. Finished trainings are kept.
    """
    for seed in seeds:
        for race in races:
            for name in contenders:
                setting.measured({"kind": "train", "race": race, "rate": None, "contender": name, "seed": seed})


def reached(record: Record) -> int | None:
    """Return the step of a training's first evaluation that has reached the race's target; None if none has."""
    race = RACES[record["race"]]
    return next((step for step, _, score in record["evaluations"] if race.reached(score)), None)


def best(records: Sequence[Record]) -> Record:
    """Return the training that reached the target first; of several the one with the better score at the end."""

    def order(record: Record) -> tuple[float, float]:
        sign = -1 if RACES[record["race"]].task.metric.higher_is_better else 1
        return reached(record) or float("inf"), sign * record["evaluations"][-1][2]

    return min(records, key=order)


# -- times --------------------------------------------------------------------------------------------------


def time_all(
    setting: Setting, races: Sequence[str], contenders: Sequence[str], rates: Sequence[str], rounds: int, turn: float
) -> None:
    """Measure milliseconds per step where there is no result yet, all contenders of a race and link in turns.

    Raises:
        LaunchError, HostsError: see :func:`start`.
        Stopped: Ctrl-C. Links that are finished are kept.
    """
    names = list(dict.fromkeys(map(without_rate, contenders)))
    for rate in rates:
        for race in races:
            labels = {"kind": "time", "race": race, "rate": rate, "rounds": rounds, "turn": turn}
            setting.measured(labels, contenders=names)
