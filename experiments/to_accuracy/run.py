"""Start ranks for trainings and for timings, and keep each result in a file, so that the same command goes on."""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.cluster import launcher
from experiments.cluster.hosts import Hosts
from experiments.to_accuracy.contenders import at_rate, without_rate
from experiments.to_accuracy.races import RACES, Race

MODULE = "experiments.to_accuracy.rank"
Record = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """What trains, and where results are kept.

    Attributes:
        folder: has a file for each result.
        console: shows progress.
        driver: "ddp" or "horovod".
        device: "cpu", or "cuda" for one GPU that all ranks share.
    """

    folder: Path
    console: Console
    driver: str = "ddp"
    device: str = "cpu"

    @property
    def key(self) -> Record:
        """The part of a result's key that names driver and device; results from the CPU do not name the device."""
        return {"driver": self.driver} | ({} if self.device == "cpu" else {"device": self.device})


def launch(do: str, race: str, setting: Setting, rate: str | None, log: Path, **more: Any) -> list[Record]:
    """Start all ranks of a race, on emulated hosts if there is a ``rate``, and return the records that rank 0 printed.

    Raises:
        launcher.LaunchError: the ranks failed; the message has the end of their output.
        HostsError: emulated hosts cannot be set up.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    count = RACES[race].task.ranks
    given = {"do": do, "race": race, "driver": setting.driver, "device": setting.device, **more}
    words = ["-m", MODULE, json.dumps(given)]
    with ExitStack() as stack:
        hosts = stack.enter_context(Hosts(count, rate)) if rate else None
        started: list[launcher.Ranks] = []
        if setting.driver == "horovod":
            lines = [launcher.command(count, "gloo", *words, hosts=hosts)]
        else:
            lines = [launcher.rank_line(rank, count, words, hosts) for rank in range(count)]
        for line in lines:
            ranks = launcher.Ranks(line, count, log, hosts if setting.driver == "horovod" else None)
            started.append(stack.enter_context(ranks))
        while any(each.process.poll() is None for each in started):
            if any(each.process.poll() for each in started):
                time.sleep(2.0)  # the others may say what has failed
                break
            time.sleep(0.1)
        failed = any(each.process.poll() for each in started)
    found = list(_records(log))
    if failed or not found:
        raise launcher.LaunchError(f"{race}, {more}: ended without a result\n{launcher.tail(log)}")
    return found


def _records(log: Path) -> Iterator[Record]:
    """Yield the lines of JSON in a log; horovodrun puts the rank in front of each."""
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        start = line.find('{"')
        if start >= 0 and line.endswith("}") and not line.startswith("$"):
            yield json.loads(line[start:])


def _keep(file: Path, record: Record) -> Record:
    half = file.with_suffix(".half")
    half.write_text(json.dumps(record) + "\n", encoding="utf-8")
    half.replace(file)
    return record


def _file(folder: Path, kind: str, key: Record) -> Path:
    """Return the file of a result: named after its key, which is everything that the result depends on."""
    text = json.dumps(key, sort_keys=True)
    return folder / kind / f"{key['race']}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def _shape(race: Race) -> Record:
    """Return the settings of a race that its results depend on, as plain data."""
    return {**vars(race), "task": vars(race.task)}


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
        launcher.LaunchError, HostsError: see :func:`launch`.
        Stopped: Ctrl-C. Finished trainings are kept.
    """
    for seed in seeds:
        for race in races:
            for contender in contenders:
                tried = [at_rate(contender, factor) for factor in factors]
                if seed != seeds[0] and len(tried) > 1:
                    first = [train(setting, race, name, seeds[0], rate) for name in tried]
                    tried = [best(first)["contender"]]
                for name in tried:
                    train(setting, race, name, seed, rate)


def train(setting: Setting, race: str, contender: str, seed: int, rate: str | None) -> Record:
    """Return the result of a training: it is run if it has not been."""
    key = {"race": race, "contender": contender, "seed": seed, "rate": rate, **setting.key}
    file = _file(setting.folder, "train", {**key, "settings": _shape(RACES[race])})
    if file.exists():
        return json.loads(file.read_text(encoding="utf-8"))
    began = time.perf_counter()
    log = file.with_suffix(".log")
    found = launch("train", race, setting, rate, log, contender=contender, seed=seed)
    if not found[-1].get("done"):
        raise launcher.LaunchError(f"{race} {contender} seed {seed} ended early\n{launcher.tail(log)}")
    record = _keep(file, {**key, "evaluations": found[:-1]})
    there = reached(record)
    when = f"target after {there['step']} steps" if there else "target not reached"
    setting.console.print(
        f"{race} {contender}, seed {seed}: {when}, {found[-2]['score']:.2f} at the end "
        f"({time.perf_counter() - began:.0f} s)",
        highlight=False,
    )
    return record


def reached(record: Record) -> Record | None:
    """Return the first evaluation of a training that has reached the race's target; None if none has."""
    race = RACES[record["race"]]
    return next((each for each in record["evaluations"] if race.reached(each["score"])), None)


def best(records: Sequence[Record]) -> Record:
    """Return the training that reached the target first; of several the one with the better score at the end."""

    def rank(record: Record) -> tuple[float, float]:
        there, race = reached(record), RACES[record["race"]]
        sign = -1 if race.task.metric.higher_is_better else 1
        return (there["step"] if there else float("inf"), sign * record["evaluations"][-1]["score"])

    return min(records, key=rank)


# -- times --------------------------------------------------------------------------------------------------


def time_all(
    setting: Setting, races: Sequence[str], contenders: Sequence[str], rates: Sequence[str], rounds: int, turn: float
) -> None:
    """Measure milliseconds per step where there is no result yet, all contenders of a race and link in turns.

    Raises:
        launcher.LaunchError, HostsError: see :func:`launch`.
        Stopped: Ctrl-C. Links that are finished are kept.
    """
    names = list(dict.fromkeys(map(without_rate, contenders)))
    for rate in rates:
        for race in races:
            given = {"contenders": names, "rounds": rounds, "turn": turn}
            key = {"race": race, "rate": rate, **given, **setting.key}
            file = _file(setting.folder, "time", {**key, "settings": _shape(RACES[race])})
            if file.exists():
                continue
            found = launch("time", race, setting, rate, file.with_suffix(".log"), **given)
            record = _keep(file, {**key, "measured": {each["contender"]: each["milliseconds"] for each in found}})
            setting.console.print(f"{race} at {rate}: {', '.join(said(record))}", highlight=False)


def median_of(turns: Sequence[Sequence[float]]) -> float:
    """Return the median over all steps of all turns."""
    return statistics.median(each for turn in turns for each in turn)


def said(record: Record) -> Iterator[str]:
    """Yield each contender with its median time, for progress."""
    for name, turns in record["measured"].items():
        yield f"{name} {median_of(turns):.0f} ms"


def records(place: Path, kind: str) -> list[Record]:
    """Return all results of a kind, "train" or "time", of a folder or of a file that :func:`save` has written."""
    if place.is_file():
        return json.loads(place.read_text(encoding="utf-8"))[kind]
    return [json.loads(file.read_text(encoding="utf-8")) for file in sorted((place / kind).glob("*.json"))]


def save(place: Path, file: Path) -> None:
    """Write all results into one file, a line each."""
    kinds = []
    for kind in ("train", "time"):
        lines = ",\n".join(json.dumps(record) for record in records(place, kind))
        kinds.append(f'"{kind}": [\n{lines}\n]')
    file.write_text("{" + ",\n".join(kinds) + "}\n", encoding="utf-8")
