"""Race contenders to a target accuracy: seconds of DDP training over emulated hosts.

Each run starts four ranks of ``race_rank.py``, a host each, and keeps its result in a file. A contender is one of
:data:`BASELINES`, optionally with settings of the optimizer (``dense@mu=0,lr=10``), or a method as in
``contenders.py``. The baseline ``fp16`` is PyTorch's hook; ``fp16:plain`` is the method.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from hvdcompress.lab.cluster import launcher
from hvdcompress.lab.cluster.hosts import Hosts
from hvdcompress.lab.cluster.stopping import stoppable
from hvdcompress.lab.momentum import contenders
from hvdcompress.lab.momentum.contenders import Contender

MODULE = "hvdcompress.lab.momentum.race_rank"
HOSTS = 4
PORT = 29511
EVERY = 20  #: steps between evaluations
TIMEOUT = 1800.0  #: seconds of one run; dense training at 100 Mbit/s takes more than half of it
HOOKS = ("fp16", "ddp_powersgd_r4", "ddp_powersgd_r2", "ddp_powersgd_r1")  #: PyTorch's own
BASELINES = ("noop", "dense", *HOOKS)


def baseline_of(contender: str) -> str | None:
    """Return the baseline of a contender; None if it is a method of hvdcompress."""
    name = contender.partition("@")[0]
    return name if name in BASELINES else None


def parse(name: str) -> Contender:
    """Read a contender.

    Raises:
        ValueError: a method or a setting does not exist, or a baseline has settings beyond those of the optimizer.

    >>> parse("dense@mu=0,lr=10").momentum
    0.0
    """
    baseline = baseline_of(name)
    if baseline is None:
        return contenders.parse(name)
    dense = contenders.parse(f"none{name.removeprefix(baseline)}")
    if dense.settings != {"method": "none"} or dense.form != "default":
        raise ValueError(f"{name}: {baseline} takes mu and lr only")
    return replace(dense, name=name)


def run(names: Sequence[str], seeds: Sequence[int], rate: str, steps: int, folder: Path, console: Console) -> None:
    """Measure what has no result yet, the contenders of a seed one after another.

    Raises:
        launcher.LaunchError: ranks have ended without a result.
        HostsError: emulated hosts cannot be set up.
        Stopped: Ctrl-C. Finished runs are kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    runs = [(seed, name) for seed in seeds for name in names]
    with stoppable():
        for number, (seed, name) in enumerate(runs, 1):
            file = folder / f"{name}-{rate}-{steps}-{seed}.json".replace("/", "-")
            if file.exists():
                continue
            record: dict[str, Any] = {"contender": name, "seed": seed, "rate": rate, "steps": steps}
            record |= _one(name, seed, rate, steps, file.with_suffix(".log"))
            half = file.with_suffix(".half")
            half.write_text(json.dumps(record) + "\n", encoding="utf-8")
            half.replace(file)
            last = record["evaluations"][-1]
            console.print(f"[{number}/{len(runs)}] {name}, seed {seed}: {last['accuracy']:.1f} % after", end=" ")
            console.print(f"{last['seconds']:.0f} s, {record['milliseconds']:.0f} ms a step", highlight=False)


def _one(name: str, seed: int, rate: str, steps: int, log: Path) -> dict[str, Any]:
    """Train one contender over hosts of its own."""
    log.unlink(missing_ok=True)
    words = ["-m", MODULE, name, str(seed), str(steps), str(EVERY), str(TIMEOUT)]
    with Hosts(HOSTS, rate) as hosts:
        ranks: list[launcher.Ranks] = []
        try:
            for rank, host in enumerate(hosts.names):
                given = {"RANK": rank, "WORLD_SIZE": HOSTS, "MASTER_ADDR": hosts.names[0], "MASTER_PORT": PORT}
                line = ["env", *(f"{key}={value}" for key, value in given.items()), sys.executable, *words]
                ranks.append(launcher.Ranks(hosts.command(host, *line), HOSTS, log))
            while any(each.process.poll() is None for each in ranks):
                if any(each.process.poll() for each in ranks):
                    time.sleep(2.0)  # the others may say what has failed
                    break
                time.sleep(0.1)
        finally:
            for each in ranks:
                each.stop()
    found = [json.loads(text) for text in log.read_text(encoding="utf-8").splitlines() if text.startswith("{")]
    if not found or "milliseconds" not in found[-1]:
        raise launcher.LaunchError(f"{name}, seed {seed} ended without a result\n{launcher.tail(log)}")
    return {"evaluations": found[:-1], **found[-1]}


def records(folder: Path) -> list[dict[str, Any]]:
    """Return all results of a folder."""
    return [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))]


def reached(record: Mapping[str, Any], target: float) -> dict[str, Any] | None:
    """Return the first evaluation of a run at or above the target accuracy; None if there is none."""
    return next((each for each in record["evaluations"] if each["accuracy"] >= target), None)


def markdown(found: Sequence[Mapping[str, Any]], target: float) -> str:
    """Return a table of the contenders, best first: seconds to the target, and against the best of PyTorch's hooks.

    Args:
        found: records of the same seeds for each contender.
        target: an accuracy in %.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for record in found:
        groups.setdefault(record["contender"], []).append(record)
    mean: dict[str, float] = {}
    for name, several in groups.items():
        ends = [reached(record, target) for record in several]
        if name != "noop" and all(ends):
            mean[name] = statistics.fmean(end["seconds"] for end in ends if end)
    best = min((mean[name] for name in mean if baseline_of(name) in HOOKS), default=None)
    lines = [
        f"| contender | ms per step | steps to {target:g} % | seconds to {target:g} %, by seed | mean "
        "| of the best hook | accuracy at the end |",
        "|---|---:|---|---|---:|---:|---:|",
    ]
    for name in sorted(groups, key=lambda name: mean.get(name, float("inf"))):
        several = groups[name]
        ends = [reached(record, target) for record in several]
        steps, seconds = (
            ", ".join(f"{end[key]:.{digits}f}" if end and name != "noop" else "–" for end in ends)
            for key, digits in (("step", 0), ("seconds", 1))
        )
        milliseconds = statistics.median(record["milliseconds"] for record in several)
        accuracy = statistics.fmean(record["evaluations"][-1]["accuracy"] for record in several)
        average = f"{mean[name]:.1f}" if name in mean else "–"
        ratio = f"{mean[name] / best:.2f}" if name in mean and best else "–"
        lines.append(f"| {name} | {milliseconds:.0f} | {steps} | {seconds} | {average} | {ratio} | {accuracy:.1f} |")
    return "\n".join(lines)
