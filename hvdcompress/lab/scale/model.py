"""``hvdcompress scale``: the model of ``cost.py`` fitted to measured exchanges, and what it says of larger clusters.

Measured exchanges come from folders that ``hvdcompress bench`` wrote (its contenders over Horovod's ring: methods, and
stock Horovod's ``none``), and from files of ``lab.scale.links`` (collectives of MPI alone, among several
numbers of hosts). The codec is timed here, in one process.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from scipy.optimize import nnls

from hvdcompress.lab import nets
from hvdcompress.lab.cluster.links import Rate
from hvdcompress.lab.scale import cost
from hvdcompress.lab.scale.cost import Codec, Constants, Errors, Point, Work
from hvdcompress.lab.training.experiment import MethodEntry
from hvdcompress.method import Method, TensorSpec
from hvdcompress.plan import Plan, Program, load

__all__ = ["WORKERS", "Model", "Row", "model_from", "points_of", "predict", "tensors_of", "time_codec"]

WORKERS = (2, 4, 8, 16, 64, 256, 1024, 4096)
DENSE = "dense (stock Horovod)"
SIZES = (  # tensors that codecs are timed on, of three sizes: the first that a method suits
    ((4096,), (64, 64), (16, 16, 3, 3)),
    ((65536,), (256, 256), (64, 64, 3, 3)),
    ((1 << 20,), (1024, 1024), (256, 512, 3, 3)),
)
WORLDS = (2, 8)  # that codecs are timed for
REPEATS = 5
FOLDS = 4


# -- what is to be exchanged ---------------------------------------------------------------------------


def tensors_of(words: str) -> nets.Shapes:
    """Tensors by the name of a net, by a file of shapes (YAML or JSON: name: [extents]), or by a number of elements.

    A number makes matrices of about a million elements.

    Raises:
        ValueError: it is none of them. FileNotFoundError: there is no such file.
    """
    if words.replace("_", "").isdigit():
        return _matrices(int(words))
    if words in nets.NETS or not (os.sep in words or Path(words).suffix or Path(words).exists()):
        return nets.get(words)
    given = yaml.safe_load(Path(words).read_text(encoding="utf-8"))
    if not isinstance(given, Mapping) or not given:
        raise ValueError(f"{words} must hold names and shapes, such as `conv1: [64, 3, 7, 7]`")
    for name, shape in given.items():
        if not (isinstance(shape, list) and all(isinstance(n, int) and n > 0 for n in shape)):
            raise ValueError(f"{words}: {name}: {shape!r} is no shape: write a list of positive whole numbers")
    return {str(name): tuple(shape) for name, shape in given.items()}


def _matrices(elements: int) -> nets.Shapes:
    if elements < 1:
        raise ValueError("there must be 1 element at least")
    count = -(-elements // 10**6)
    side = max(1, math.isqrt(elements // count))
    made: nets.Shapes = {f"tensor{number}": (side, elements // count // side) for number in range(count)}
    if rest := elements - nets.total(made):
        made["rest"] = (rest,)
    return made


# -- the codec -----------------------------------------------------------------------------------------


def name_of(method: Method) -> str:
    """What a method is known by in the file of constants: its id, and what is not its default."""
    return str(Program(((0, method),)))


def time_codec(method: Method) -> Codec:
    """Time one rank's codec on this machine: tensors of three sizes, payloads of 2 and of 8 ranks."""
    phase, rows = imagined.last_phase(method), []
    for candidates in SIZES:
        fitting = (TensorSpec("timed", shape) for shape in candidates)
        spec = next((spec for spec in fitting if method.suits(spec)), None)
        if spec is None:
            continue
        x = np.random.default_rng(spec.size).normal(size=spec.size).astype(np.float32)
        for world in WORLDS:
            tried = [imagined.watch(method, phase, world, spec, x) for _ in range(1 + REPEATS)][1:]
            pieces, num_bytes = cost.gathered(tried[0][0], world)
            rows.append((1.0, spec.size, pieces, num_bytes, statistics.median(seconds for _, seconds in tried)))
    if not rows:
        return Codec()
    table = np.array(rows)
    features = table[:, :4] / table[:, 4:]
    scale = np.maximum(features.max(axis=0), 1e-300)
    return Codec(*(nnls(features / scale, np.ones(len(table)))[0] / scale).tolist())


# -- measured exchanges --------------------------------------------------------------------------------


def points_of(path: Path, codec: Callable[[Method], Codec]) -> tuple[list[Point], dict[str, Any]]:
    """The measured exchanges in a benchmark's folder or in a file of ``lab.scale.links``, and where they are
    from.

    Raises:
        ValueError: it holds none. FileNotFoundError: there is no such file.
    """
    if path.is_dir():
        return _bench_points(path, codec)
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    source = {"file": str(path), **(lines[0] if lines and "machine" in lines[0] else {})}
    points = [Point.from_dict(line) for line in lines if "machine" not in line]
    if not points:
        raise ValueError(f"{path} holds no measured exchange")
    return points, source


def _bench_points(folder: Path, codec: Callable[[Method], Codec]) -> tuple[list[Point], dict[str, Any]]:
    from hvdcompress.lab.bench.config import LOOPBACK, Bench, read_turns

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
            if contender.where == "ring" and contender.spec["kind"] == "none":
                one = cost.stock(tensors[set], bench.hosts)
            elif contender.where == "ring" and contender.spec["kind"] == "method":
                one = cost.work(load(contender.spec["settings"]), tensors[set], bench.hosts, codec)
            worked[set, label] = one
        if done := worked[set, label]:
            points.append(Point(label, set, Rate.parse(rate).slower, shared, statistics.median(seconds), done))
    if not points:
        raise ValueError(f"{folder} holds no exchange over Horovod's ring on emulated hosts")
    return points, {key: launch[key] for key in ("command", "commit", "machine") if key in launch} | {
        "folder": str(folder)
    }


# -- the fitted model ----------------------------------------------------------------------------------


@dataclass
class Model:
    """Fitted constants, timed codecs, and how far off predictions of points were that the fit had not seen."""

    constants: Constants
    codecs: dict[str, Codec] = field(default_factory=dict)
    held_out: dict[str, Errors] = field(default_factory=dict)
    sources: list[dict[str, Any]] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    made: str = ""

    def codec(self, method: Method) -> Codec:
        """A method's codec; timed now, if it is not known."""
        name = name_of(method)
        if name not in self.codecs:
            self.codecs[name] = time_codec(method)
        return self.codecs[name]

    def save(self, file: Path) -> None:
        """Write it as JSON, with every point that it was fitted to."""
        written = {
            "made": self.made,
            "constants": asdict(self.constants),
            "held_out": {split: found._asdict() for split, found in self.held_out.items()},
            "sources": self.sources,
            "codecs": {name: asdict(codec) for name, codec in sorted(self.codecs.items())},
            "points": [point.to_dict() for point in self.points],
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        text = ",\n".join(f' "{key}": {_entries(value)}' for key, value in written.items())
        file.write_text("{\n" + text + "\n}\n", encoding="utf-8")

    @classmethod
    def open(cls, file: Path) -> Model:
        """What :meth:`save` wrote.

        Raises:
            FileNotFoundError: there is no such file. ValueError: it holds something else.
        """
        if not file.is_file():
            raise FileNotFoundError(f"{file} does not exist: `hvdcompress scale --fit RESULTS` makes it")
        try:
            read = json.loads(file.read_text(encoding="utf-8"))
            return cls(
                Constants(**read["constants"]),
                {name: Codec(**given) for name, given in read["codecs"].items()},
                {split: Errors(**given) for split, given in read["held_out"].items()},
                read["sources"],
                [Point.from_dict(given) for given in read["points"]],
                read["made"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{file} holds no fitted model: {error!r}") from None


def _entries(value: Any) -> str:
    """JSON with each entry of a list or dict on a line, so that a change shows as one."""

    def text(part: Any) -> str:
        return json.dumps(part, ensure_ascii=False)

    if isinstance(value, dict):
        return "{\n" + ",\n".join(f"  {text(key)}: {text(part)}" for key, part in value.items()) + "\n }"
    if isinstance(value, list):
        return "[\n" + ",\n".join(f"  {text(part)}" for part in value) + "\n ]"
    return text(value)


def model_from(paths: Iterable[Path], known: Mapping[str, Codec] | None = None) -> Model:
    """Fit the constants to the measured exchanges in ``paths``, and try them on points that were left out.

    Raises:
        ValueError: there are too few. FileNotFoundError: a path does not exist.
    """
    model = Model(Constants(), dict(known or {}), made=time.strftime("%Y-%m-%d"))
    for path in paths:
        points, source = points_of(path, model.codec)
        # where ranks outnumber processors, a bare collective's time is the scheduler's
        points = [point for point in points if point.work.calls or point.shared <= 1]
        model.points += points
        model.sources.append({**source, "points": len(points)})
    model.constants = cost.fit(model.points)
    model.held_out = held_out(model.points)
    return model


def held_out(points: Sequence[Point]) -> dict[str, Errors]:
    """Errors of predictions from fits that had not seen the point, by what was held out: every fourth exchange in
    turn; each method in turn; each set in turn; all exchanges among the most hosts, predicted from those among fewer.
    Where there is too little left to fit to, a split is left out.

    Collectives of MPI alone are fitted to, too, but it is not they that are to be foretold. What was measured twice is
    held out together."""
    exchanges = [point for point in points if point.work.calls]
    keys = sorted({_what(point) for point in exchanges})
    fold = {key: number % FOLDS for number, key in enumerate(keys)}
    splits: dict[str, Callable[[Point], Any]] = {
        "a quarter, in turn": lambda point: fold[_what(point)],
        "a method, in turn": lambda point: point.label,
        "a set, in turn": lambda point: point.set,
    }
    result = {}
    for name, part in splits.items():
        with contextlib.suppress(ValueError):  # too few
            result[name] = _in_turn(points, exchanges, part)
    most = max((point.work.world for point in exchanges), default=0)
    held = [point for point in exchanges if point.work.world == most]
    with contextlib.suppress(ValueError):
        result[f"{most} hosts, from fewer"] = cost.errors(cost.fit([p for p in points if p.work.world < most]), held)
    return result


def _what(point: Point) -> tuple[Any, ...]:
    return point.set, point.label, point.work.world, point.rate


def _in_turn(points: Sequence[Point], exchanges: Sequence[Point], part: Callable[[Point], Any]) -> Errors:
    """Each part of the exchanges, foretold from all that is not in it."""
    found = []
    parts = dict.fromkeys(map(part, exchanges))
    if len(parts) < 2:
        raise ValueError("one part: nothing would be left")
    for one in parts:
        held = [point for point in exchanges if part(point) == one]
        constants = cost.fit([point for point in points if not point.work.calls or part(point) != one])
        found += [cost.errors(constants, [point]) for point in held]
    worst = max(found, key=lambda each: each.worst)
    return Errors(statistics.median(each.median for each in found), worst.worst, worst.which, len(found))


# -- prediction ----------------------------------------------------------------------------------------


@dataclass
class Row:
    """What the model says of one method over links of one speed, by the number of workers."""

    rate: str
    label: str
    formula: str
    seconds: dict[int, float]
    on_wire: dict[int, float]
    parts: dict[int, dict[str, float]]
    is_dense: bool = False
    loses: list[int] = field(default_factory=list)  #: numbers of workers at which dense is as fast

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def predict(
    model: Model,
    entries: Sequence[MethodEntry],
    tensors: Mapping[str, tuple[int, ...]],
    rates: Sequence[str],
    workers: Sequence[int] = WORKERS,
    say: Callable[[str], None] = lambda label: None,
) -> list[Row]:
    """Rows by rate, dense first; each rank has a processor of its own.

    Raises:
        ValueError: a rate is none, or a number of workers is below 2.
    """
    speeds = {rate: Rate.parse(rate).slower for rate in rates}
    if not workers or min(workers) < 2:
        raise ValueError(f"{list(workers)} workers: there must be 2 at least")
    workers = sorted(set(workers))
    all_works: dict[str, dict[int, Work]] = {DENSE: {p: cost.stock(tensors, p) for p in workers}}
    settings = {DENSE: "4n bytes, summed"}
    for entry in entries:
        say(entry.label)
        plan: Plan = entry.plan
        all_works[entry.label] = {p: cost.work(plan, tensors, p, model.codec) for p in workers}
        settings[entry.label] = str(plan.program)
    rows = []
    for rate, speed in speeds.items():
        dense: dict[int, float] = {}
        for label, works in all_works.items():
            parts = {p: model.constants.parts(one, speed) for p, one in works.items()}
            seconds = {p: sum(part.values()) for p, part in parts.items()}
            wire = {p: one.on_wire for p, one in works.items()}
            row = Row(rate, label, settings[label], seconds, wire, parts, label == DENSE)
            dense = dense or seconds
            if not row.is_dense:
                row.loses = [p for p in workers if seconds[p] >= dense[p]]
            rows.append(row)
    return rows
