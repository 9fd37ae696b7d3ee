"""The cost model, fitted to measured exchanges: constants, timed codecs, and errors on held-out exchanges."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from experiments.scale import cost, imagined
from experiments.scale.cost import Codec, Constants, Driver, Errors, Point
from hvdcompress.method import Method, TensorSpec
from hvdcompress.plan import Program

__all__ = ["SIZES", "Model", "fit_codec", "name_of", "time_codec"]

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
