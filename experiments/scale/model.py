"""The cost model, fitted to measured exchanges: constants, timed codecs, and errors on held-out exchanges."""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from experiments.scale import cost, imagined
from experiments.scale.cost import Codec, Constants, Driver, Errors, Point
from experiments.scale.points import points_of
from hvdcompress.method import Method, TensorSpec
from hvdcompress.plan import Program

__all__ = ["SIZES", "Model", "fit_codec", "held_out", "model_from", "name_of", "time_codec"]

SIZES = (  # tensors that codecs are timed on, of three sizes: the first that a method suits
    ((4096,), (64, 64), (16, 16, 3, 3)),
    ((65536,), (256, 256), (64, 64, 3, 3)),
    ((1 << 20,), (1024, 1024), (256, 512, 3, 3)),
)
WORLD_SIZES = (2, 8)  # that codecs are timed for
REPEATS = 5
FOLDS = 4


def name_of(method: Method) -> str:
    """A method's name in the file of constants: its id, and the hyper-parameters that are not at their defaults."""
    return str(Program(((0, method),)))


def time_codec(method: Method) -> Codec:
    """Time one rank's codec on this machine, on tensors of three sizes with payloads of 2 and of 8 ranks."""
    phase, rows = imagined.last_phase(method), []
    for candidates in SIZES:
        fitting = (TensorSpec("timed", shape) for shape in candidates)
        spec = next((spec for spec in fitting if method.suits(spec)), None)
        if spec is None:
            continue
        x = np.random.default_rng(spec.size).normal(size=spec.size).astype(np.float32)
        for world_size in WORLD_SIZES:
            tried = [imagined.watch(method, phase, world_size, spec, x) for _ in range(1 + REPEATS)][1:]
            pieces, num_bytes = cost.gathered(tried[0][0], world_size)
            rows.append((1.0, spec.size, pieces, num_bytes, statistics.median(seconds for _, seconds in tried)))
    if not rows:
        return Codec()
    return fit_codec(rows)


def fit_codec(rows: Sequence[tuple[float, ...]]) -> Codec:
    """The least squares of relative errors, no constant being negative.

    Args:
        rows: tensors, elements, gathered payloads, their bytes, and the seconds that these took.
    """
    table = np.array(rows)
    features = table[:, :4] / table[:, 4:]
    scale = np.maximum(features.max(axis=0), 1e-300)
    return Codec(*(nnls(features / scale, np.ones(len(table)))[0] / scale).tolist())


@dataclass
class Model:
    """A driver's fitted constants, timed codecs, and how far off predictions of points were that no fit had seen."""

    constants: Constants
    codecs: dict[str, Codec] = field(default_factory=dict)
    held_out: dict[str, Errors] = field(default_factory=dict)
    sources: list[dict[str, Any]] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    made: str = ""
    driver: Driver = "horovod"

    def codec(self, method: Method) -> Codec:
        """A method's codec; it is timed now if it is not known."""
        name = name_of(method)
        if name not in self.codecs:
            self.codecs[name] = time_codec(method)
        return self.codecs[name]

    def save(self, file: Path) -> None:
        """Write it as JSON, with every point that it was fitted to."""
        written = {
            "made": self.made,
            "driver": self.driver,
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
        """Read what :meth:`save` wrote.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it holds something else.
        """
        if not file.is_file():
            raise FileNotFoundError(f"{file} does not exist: `python -m experiments scale --fit RESULTS` makes it")
        try:
            read = json.loads(file.read_text(encoding="utf-8"))
            return cls(
                Constants(**read["constants"]),
                {name: Codec(**given) for name, given in read["codecs"].items()},
                {split: Errors(**given) for split, given in read["held_out"].items()},
                read["sources"],
                [Point.from_dict(given) for given in read["points"]],
                read["made"],
                read.get("driver", "horovod"),
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


def model_from(paths: Iterable[Path], known: Mapping[str, Codec] | None = None, driver: Driver = "horovod") -> Model:
    """Fit the constants to measured exchanges, and try them on exchanges that were left out.

    Args:
        paths: folders and files, as :func:`points_of` reads them.
        known: codecs that need not be timed.
        driver: whose exchanges.

    Raises:
        ValueError: there are too few.
        FileNotFoundError: a path does not exist.
    """
    model = Model(Constants(), dict(known or {}), made=time.strftime("%Y-%m-%d"), driver=driver)
    for path in paths:
        points, source = points_of(path, model.codec, driver)
        # where ranks outnumber processors, a bare collective's time is the scheduler's
        points = [point for point in points if point.work.calls or point.shared <= 1]
        model.points += points
        model.sources.append({**source, "points": len(points)})
    model.constants = cost.fit(model.points)
    model.held_out = held_out(model.points)
    return model


def held_out(points: Sequence[Point]) -> dict[str, Errors]:
    """Errors of predictions by fits that had not seen the exchange, by what was held out.

    Every fourth exchange in turn; each method in turn; each set in turn; all exchanges among the most hosts, predicted
    from those among fewer. A split is left out where too little is left to fit to. Collectives of MPI alone are used in
    the fits but not predicted. Exchanges that were measured twice are held out together.
    """
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
    most = max((point.work.world_size for point in exchanges), default=0)
    held = [point for point in exchanges if point.work.world_size == most]
    with contextlib.suppress(ValueError):
        result[f"{most} hosts, from fewer"] = cost.errors(
            cost.fit([p for p in points if p.work.world_size < most]), held
        )
    return result


def _what(point: Point) -> tuple[Any, ...]:
    return point.set, point.label, point.work.world_size, point.rate


def _in_turn(points: Sequence[Point], exchanges: Sequence[Point], part: Callable[[Point], Any]) -> Errors:
    """Each part of the exchanges, predicted from all others."""
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
