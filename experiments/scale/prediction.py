"""Predictions of the fitted model: seconds and bytes of an exchange, by the number of workers."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from experiments import nets
from experiments.cluster.rates import Rate
from experiments.configfile import MethodEntry
from experiments.scale import cost
from experiments.scale.cost import Work
from experiments.scale.model import Model
from hvdcompress.plan import Plan, plan_of

__all__ = ["DENSE", "WORKERS", "Row", "predict", "tensors_of"]

WORKERS = (2, 4, 8, 16, 64, 256, 1024, 4096)
DENSE = "dense (stock Horovod)"
DENSE_MPI = "dense (`none` over mpi4py)"


def tensors_of(words: str) -> nets.Shapes:
    """The tensors to exchange.

    Args:
        words: the name of a net, a file of shapes (YAML or JSON: name: [extents]), or a number of elements, which gives
            matrices of about a million elements.

    Raises:
        ValueError: it is not any of these.
        FileNotFoundError: there is no such file.
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
            raise ValueError(f"{words}: {name}: {shape!r} is not a shape: write a list of positive whole numbers")
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


@dataclass
class Row:
    """Predictions for one method over links of one speed, by the number of workers."""

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
    """Predict exchanges among workers that each have a processor of their own.

    Args:
        model: the fitted model.
        entries: the methods.
        tensors: shapes by name.
        rates: of the links, such as "1gbit".
        workers: numbers of workers.
        say: called with each method's label before its turn.

    Returns:
        Rows by rate, dense first.

    Raises:
        ValueError: a rate is not a rate, or a number of workers is below 2.
    """
    speeds = {rate: Rate.parse(rate).slower for rate in rates}
    if not workers or min(workers) < 2:
        raise ValueError(f"{list(workers)} workers: there must be 2 at least")
    workers = sorted(set(workers))
    if model.driver == "horovod":
        dense_label, dense_works = DENSE, {p: cost.stock(tensors, p) for p in workers}
    else:
        none = plan_of("none")
        dense_label = DENSE_MPI
        dense_works = {p: cost.work(none, tensors, p, model.codec, model.driver) for p in workers}
    all_works: dict[str, dict[int, Work]] = {dense_label: dense_works}
    settings = {dense_label: "4n bytes, summed"}
    for entry in entries:
        say(entry.label)
        plan: Plan = entry.plan
        all_works[entry.label] = {p: cost.work(plan, tensors, p, model.codec, model.driver) for p in workers}
        settings[entry.label] = str(plan.program)
    rows = []
    for rate, speed in speeds.items():
        dense: dict[int, float] = {}
        for label, works in all_works.items():
            parts = {p: model.constants.parts(one, speed) for p, one in works.items()}
            seconds = {p: sum(part.values()) for p, part in parts.items()}
            wire = {p: one.on_wire for p, one in works.items()}
            row = Row(rate, label, settings[label], seconds, wire, parts, label == dense_label)
            dense = dense or seconds
            if not row.is_dense:
                row.loses = [p for p in workers if seconds[p] >= dense[p]]
            rows.append(row)
    return rows
