"""Measured exchanges to fit the cost model to.

They come from folders that ``experiments bench`` wrote (of one driver: contenders over Horovod's ring, stock Horovod's
``none`` among them, or over mpi4py), and from files of ``lab.scale.links`` (collectives of MPI alone).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.bench.config import LOOPBACK, Bench, read_turns
from experiments.cluster.rates import Rate
from experiments.output import jsonl
from experiments.scale import cost
from experiments.scale.cost import Codec, Driver, Point, Work
from hvdcompress.method import Method
from hvdcompress.plan import load

__all__ = ["points_of"]

WHERE: dict[Driver, str] = {"horovod": "ring", "mpi4py": "mpi4py"}  #: the ranks that run a driver's contenders
NAMES: dict[Driver, str] = {"horovod": "Horovod's ring", "mpi4py": "mpi4py"}


def points_of(
    path: Path, codec: Callable[[Method], Codec], driver: Driver = "horovod"
) -> tuple[list[Point], dict[str, Any]]:
    """Read measured exchanges.

    Args:
        path: a benchmark's folder, or a file of ``lab.scale.links``.
        codec: gives a method's codec, whose seconds are part of what an exchange asks for.
        driver: whose exchanges.

    Returns:
        The exchanges, and a description of their source.

    Raises:
        ValueError: the folder or file holds no measured exchange.
        FileNotFoundError: there is no such file.
    """
    if path.is_dir():
        return _bench_points(path, codec, driver)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    lines = jsonl.read(path)
    source = {"file": str(path), **(lines[0] if lines and "machine" in lines[0] else {})}
    points = [Point.from_dict(line) for line in lines if "machine" not in line]
    if not points:
        raise ValueError(f"{path} holds no measured exchange")
    return points, source


def _bench_points(folder: Path, codec: Callable[[Method], Codec], driver: Driver) -> tuple[list[Point], dict[str, Any]]:
    if not (folder / "config.yaml").is_file():
        raise ValueError(f"{folder} holds no benchmark: it has no config.yaml")
    bench = Bench.open(folder / "config.yaml")
    file = folder / "launch.json"
    launch = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    shared = cost.sharing(bench.hosts, launch.get("machine", {}).get("cores"))
    found: dict[tuple[str, str, str], list[float]] = {}
    for turn in read_turns(folder):
        if "failed" not in turn and turn["rate"] != LOOPBACK:
            key = (turn["rate"], turn["set"], turn["contender"])
            found.setdefault(key, []).extend(one["seconds"] for one in turn["exchanges"])
    tensors = {one.label: one.tensors() for one in bench.sets}
    contenders = {each.label: each for each in bench.contenders()}
    points, worked = [], {}
    for (rate, set, label), seconds in found.items():
        if set not in tensors or label not in contenders:
            continue  # of an earlier attempt
        if (set, label) not in worked:
            contender = contenders[label]
            one: Work | None = None
            if contender.where != WHERE[driver]:
                pass
            elif contender.spec["kind"] == "none":
                one = cost.stock(tensors[set], bench.hosts)
            elif contender.spec["kind"] == "method":
                one = cost.work(load(contender.spec["settings"]), tensors[set], bench.hosts, codec, driver)
            worked[set, label] = one
        if done := worked[set, label]:
            points.append(Point(label, set, Rate.parse(rate).slower, shared, statistics.median(seconds), done))
    if not points:
        raise ValueError(f"{folder} holds no exchange over {NAMES[driver]} on emulated hosts")
    return points, {key: launch[key] for key in ("command", "commit", "machine") if key in launch} | {
        "folder": str(folder)
    }
