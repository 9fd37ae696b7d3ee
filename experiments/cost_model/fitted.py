"""The model fitted to measured exchanges: constants, timed codecs, errors of predictions of held-out exchanges.

The fits that predictions use are ``experiments/results/cost-model-horovod.json`` and ``cost-model-mpi4py.json``, with
every measured exchange.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import nnls

from experiments.bench.config import LOOPBACK, Bench
from experiments.bench.lockstep import PARTS, time_steps
from experiments.bench.report import summarize
from experiments.bench.run import read
from experiments.cost_model import model
from experiments.cost_model.imagined import requests
from experiments.cost_model.model import Codec, Driver
from experiments.report import results
from hvdcompress.cli.numbers import bits_of
from hvdcompress.method import Method, TensorSpec
from hvdcompress.plan import Program, load_plan, plan_of

Vector = np.ndarray[Any, Any]
SIZES = (  # tensors that codecs are timed on, of three sizes: the first that a method suits
    ((4096,), (64, 64), (16, 16, 3, 3)),
    ((65536,), (256, 256), (64, 64, 3, 3)),
    ((1 << 20,), (1024, 1024), (256, 512, 3, 3)),
)
WORLD_SIZES = (2, 8)  # that codecs are timed for
REPEATS = 5
WHERE = {"horovod": "ring", "mpi4py": "mpi4py"}  #: the ranks that run a driver's contenders


@dataclass
class Fitted:
    """A driver's fit.

    Attributes:
        driver: whose exchanges.
        constants: of the model.
        codecs: timed ones, by the methods' names.
        held_out: for each way to hold exchanges out, the ``median`` and ``worst`` relative error and ``which`` it was.
        points: the measured exchanges, as in :func:`model.costs`.
    """

    driver: Driver
    constants: dict[str, float] = field(default_factory=dict)
    codecs: dict[str, Codec] = field(default_factory=dict)
    held_out: dict[str, dict[str, Any]] = field(default_factory=dict)
    points: pd.DataFrame = field(default_factory=pd.DataFrame)

    @classmethod
    def open(cls, driver: Driver, folder: Path = results.FOLDER) -> Fitted:
        """Read what :meth:`save` wrote.

        Raises:
            FileNotFoundError: there is no fit of this driver in the folder.
        """
        points = results.load(f"cost-model-{driver}", folder)
        about = points.attrs
        codecs = {name: Codec(**given) for name, given in about["codecs"].items()}
        return cls(driver, about["constants"], codecs, about["held_out"], points)

    def save(self, folder: Path) -> Path:
        """Write ``cost-model-DRIVER.json``."""
        codecs = {name: codec._asdict() for name, codec in sorted(self.codecs.items())}
        return results.save(
            f"cost-model-{self.driver}",
            self.points,
            folder,
            constants=self.constants,
            held_out=self.held_out,
            codecs=codecs,
        )

    def codec(self, method: Method) -> Codec:
        """Return a method's codec; an unknown one is timed now."""
        name = name_of(method)
        if name not in self.codecs:
            self.codecs[name] = time_codec(method)
        return self.codecs[name]


def name_of(method: Method) -> str:
    """Return a method's id and the hyper-parameters that are not at their defaults."""
    return str(Program(((0, method),)))


def time_codec(method: Method) -> Codec:
    """Time one rank's codec on this machine, on tensors of three sizes among 2 and 8 ranks."""
    rows = []
    for candidates in SIZES:
        spec = next((spec for shape in candidates if method.suits(spec := TensorSpec("timed", shape))), None)
        for world_size in WORLD_SIZES if spec else ():
            assert spec
            spent = time_steps(plan_of(method, min_elements=1), [spec], world_size, REPEATS)
            seconds = spent[list(PARTS)].sum(axis=1).median()
            rows.append((*Codec.features(spec.size, requests(method, world_size, spec)), seconds))
    table = np.array(rows)
    return Codec(*least_squares(table[:, :4], table[:, 4]))


def fit_constants(points: pd.DataFrame) -> dict[str, float]:
    """Return the model's constants.

    Args:
        points: as in :func:`model.costs`, with the measured ``seconds``.

    Raises:
        ValueError: there are fewer points than constants.
    """
    if len(points) < len(model.CONSTANTS):
        raise ValueError(f"{len(points)} measured exchanges are too few for {len(model.CONSTANTS)} constants")
    found = least_squares(model.features(points).to_numpy(float), points["seconds"].to_numpy(float))
    return dict(zip(model.CONSTANTS, found, strict=True))


def least_squares(features: Vector, seconds: Vector) -> list[float]:
    """Return the factors of the columns, none of them negative, with the least squares of the *relative* errors."""
    rows = features / seconds[:, None]
    scale = np.maximum(rows.max(axis=0), 1e-300)  # of seconds and of bytes: far apart
    return (nnls(rows / scale, np.ones(len(rows)), maxiter=10_000)[0] / scale).tolist()


def fit(paths: Sequence[Path], driver: Driver = "horovod") -> Fitted:
    """Fit the constants to measured exchanges, and predict exchanges that were held out.

    Args:
        paths: folders of ``experiments bench`` with exchanges of this driver on emulated hosts, and files of
            ``experiments.cost_model.links`` (collectives of MPI alone).
        driver: whose exchanges.

    Raises:
        ValueError: there are too few.
        FileNotFoundError: a path does not exist.
    """
    fitted = Fitted(driver)
    frames = [_exchanges(path, fitted) if path.is_dir() else results.load(path.stem, path.parent) for path in paths]
    points = pd.concat(frames, ignore_index=True)
    # Where ranks outnumber cores, the time of a bare collective is the scheduler's
    fitted.points = points[(points["calls"] > 0) | (points["shared"] <= 1)].reset_index(drop=True)
    if not (fitted.points["calls"] > 0).any():
        raise ValueError(f"no exchange over {driver} on emulated hosts in {', '.join(map(str, paths))}")
    fitted.constants = fit_constants(fitted.points)
    fitted.held_out = hold_out(fitted.points)
    return fitted


def sharing(ranks: int) -> float:
    """Return the number of ranks that share the busiest core; at least 1. Emulated hosts keep to one each."""
    return float(ceil(ranks / len(os.sched_getaffinity(0))))


def _exchanges(folder: Path, fitted: Fitted) -> pd.DataFrame:
    """Return the exchanges of a driver in a folder that ``experiments bench`` wrote on this machine."""
    bench = Bench.open(folder / "config.yaml")
    tensors = {one.label: one.tensors() for one in bench.sets}
    contenders = {each.label: each for each in bench.contenders()}
    records = summarize(read(folder))
    points = []
    for row in records[records["rate"] != LOOPBACK].to_dict("records"):
        contender = contenders[row["contender"]]
        if contender.where != WHERE[fitted.driver] or contender.kind == "baseline":
            continue
        shapes = tensors[row["set"]]
        if contender.kind == "dense":
            work = model.stock(shapes, bench.hosts)
        else:
            work = model.work(load_plan(contender.spec["how"]), shapes, bench.hosts, fitted.codec, fitted.driver)
        points.append(
            {
                "label": row["contender"],
                "set": row["set"],
                "rate": bits_of(row["rate"]),
                "shared": sharing(bench.hosts),
                "seconds": row["seconds"],
                **work._asdict(),
            }
        )
    return pd.DataFrame(points)


def hold_out(points: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Return the errors of predictions by fits that had not seen the exchange, by what was held out.

    Every fourth exchange in turn; each method in turn; each set in turn; and the exchanges among the most hosts,
    predicted from those among fewer. Collectives of MPI alone are in every fit and are not predicted. Exchanges that
    were measured twice are held out together.
    """
    exchanges = points[points["calls"] > 0]
    keys = exchanges[["set", "label", "world_size", "rate"]].apply(tuple, axis=1)
    order = {key: at % 4 for at, key in enumerate(sorted(keys.unique()))}
    most = points["world_size"].max()
    parts = {
        "a quarter, in turn": keys.map(order),
        "a method, in turn": exchanges["label"],
        "a set, in turn": exchanges["set"],
        f"{most} hosts, from fewer": exchanges["world_size"][exchanges["world_size"] == most],
    }
    found = {}
    for name, part in parts.items():
        errors = []
        for _, held in part.groupby(part):
            seen = points.drop(held.index)
            if len(seen) >= len(model.CONSTANTS):
                predicted = model.costs(fit_constants(seen), points.loc[held.index]).sum(axis=1)
                errors.append((predicted / points["seconds"][held.index] - 1).abs())
        if errors:
            error = pd.concat(errors)
            which = points.loc[error.idxmax()]
            where = f"{which['label']} on {which['set']}, {which['world_size']} hosts, {which['rate'] / 1e6:g} Mbit/s"
            found[name] = {"median": error.median(), "worst": error.max(), "which": where, "points": len(error)}
    return found
