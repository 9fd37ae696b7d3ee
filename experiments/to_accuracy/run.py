"""Start ranks for trainings and for timings. Each result is a line of a file, so that the same command goes on.

A record of a training has ``evaluations`` [step, seconds, score]; one of a timing has ``milliseconds`` of each step of
each turn of one contender.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.cluster import launch
from experiments.cluster.hosts import Hosts
from experiments.momentum.contenders import at_rate, without_rate
from experiments.report import jsonl
from experiments.to_accuracy.races import RACES, Race

__all__ = ["Setting", "best", "reached", "start", "time_all", "train", "train_all"]

MODULE = "experiments.to_accuracy.rank"
TIMEOUT = 1800.0  #: seconds of one launch
Record = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """What trains, and where results are kept.

    Attributes:
        folder: gets ``results.jsonl`` and a log.
        driver: "ddp" or "horovod".
        device: "cpu", or "cuda" for one GPU that all ranks share.
    """

    folder: Path
    driver: str = "ddp"
    device: str = "cpu"

    @property
    def results(self) -> Path:
        """The file of the results."""
        return self.folder / "results.jsonl"

    def known(self, key: Record) -> list[Record]:
        """Return the results with these values."""
        return [record for record in jsonl.read(self.results) if all(record.get(k) == v for k, v in key.items())]


def start(do: str, race: str, setting: Setting, rate: str | None, **more: Any) -> list[Record]:
    """Start all ranks of a race, on emulated hosts if there is a ``rate``, and return the records that rank 0 printed.

    Raises:
        LaunchError: the ranks failed; the message has the end of their output.
        HostsError: emulated hosts cannot be set up.
    """
    setting.folder.mkdir(parents=True, exist_ok=True)
    count = RACES[race].task.ranks
    given = {"do": do, "race": race, "driver": setting.driver, "device": setting.device, **more}
    driver: launch.Driver = "ddp" if setting.driver == "ddp" else "gloo"
    log = setting.folder / "log.txt"
    hosts = Hosts(count, rate) if rate else None
    with hosts or nullcontext():
        program = ["-m", MODULE, json.dumps(given)]
        output = launch.run(program, count, driver, hosts=hosts, log=log, timeout=TIMEOUT)
    # horovodrun puts the rank in front of each line
    found = [json.loads(line[line.find('{"') :]) for line in output.splitlines() if '{"' in line and line[-1] == "}"]
    if not found:
        raise launch.LaunchError(f"{race}, {more}: ended without a result\n{launch.tail(log)}")
    return found


def _settings(race: Race) -> str:
    """Return a hash of all settings of a race that its results depend on."""
    text = json.dumps({**vars(race), "task": vars(race.task)}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# -- trainings ----------------------------------------------------------------------------------------------


def train_all(
    setting: Setting,
    races: Sequence[str],
    contenders: Sequence[str],
    seeds: Sequence[int],
    factors: Sequence[float] = (1.0,),
    rate: str | None = None,
) -> None:
    """Train what has no result yet.

    With several ``factors`` of the learning rate, a contender's first seed is trained with each of them, and its other
    seeds with the one that reached the target first.

    Raises:
        LaunchError, HostsError: see :func:`start`.
        Stopped: Ctrl-C. Finished trainings are kept.
    """
    for seed in seeds:
        for race in races:
            for contender in contenders:
                tried = [at_rate(contender, factor) for factor in factors]
                if seed != seeds[0] and len(tried) > 1:
                    tried = [best([train(setting, race, name, seeds[0], rate) for name in tried])["contender"]]
                for name in tried:
                    train(setting, race, name, seed, rate)


def train(setting: Setting, race: str, contender: str, seed: int, rate: str | None) -> Record:
    """Return the result of a training: it is run if it has not been."""
    key: Record = {"kind": "train", "race": race, "driver": setting.driver, "device": setting.device, "rate": rate}
    key |= {"contender": contender, "seed": seed, "settings": _settings(RACES[race])}
    if known := setting.known(key):
        return known[0]
    found = start("train", race, setting, rate, contender=contender, seed=seed)
    if not found[-1].get("done"):
        raise launch.LaunchError(f"{race} {contender} seed {seed} ended early")
    record = {**key, "evaluations": [[each[word] for word in ("step", "seconds", "score")] for each in found[:-1]]}
    jsonl.append(setting.results, record)
    step = reached(record)
    words = f"target after {step} steps" if step else "target not reached"
    print(f"{race} {contender}, seed {seed}: {words}, {record['evaluations'][-1][2]:.2f} at the end", flush=True)
    return record


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
    given: Record = {"contenders": list(dict.fromkeys(map(without_rate, contenders))), "rounds": rounds, "turn": turn}
    for rate in rates:
        for race in races:
            key: Record = {"kind": "time", "race": race, "driver": setting.driver, "device": setting.device}
            key |= {"rate": rate, "rounds": rounds, "turn": turn, "settings": _settings(RACES[race])}
            if {record["contender"] for record in setting.known(key)} >= set(given["contenders"]):
                continue
            for each in start("time", race, setting, rate, **given):
                jsonl.append(setting.results, {**key, **each})
                median = np.median(np.concatenate(each["milliseconds"]))
                print(f"{race} at {rate}: {each['contender']} {median:.0f} ms", flush=True)
