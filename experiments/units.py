"""Units of work: calls of measuring functions that run side by side, and whose results are kept on disk.

Each result is a line of ``results.jsonl`` in a folder, so that the same command goes on where it was interrupted.
"""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import joblib
import pandas as pd

import hvdcompress
from experiments.cluster.launch import stoppable
from experiments.report import results

FILE = "results.jsonl"


@dataclass(frozen=True)
class Unit:
    """One call of a measure.

    Args:
        measure: a function at the top of a module, so that another process can import it. It returns a record of plain
            data, or a list of them.
        settings: its keywords, plain data.
        labels: what tells its result from those of other units, such as the net and the seed.
        alone: it measures time, so nothing else may run meanwhile.
    """

    measure: Callable[..., Any]
    settings: dict[str, Any]
    labels: dict[str, Any]
    alone: bool = False

    @property
    def name(self) -> str:
        """The measure and the labels, in words."""
        labels = (value if name == "net" else f"{name} {value}" for name, value in self.labels.items() if value != "")
        return " ".join([self.measure.__name__, *map(str, labels)])

    @property
    def key(self) -> str:
        """A hash of what the result depends on."""
        hashed = joblib.hash(
            (self.measure.__module__, inspect.getsource(self.measure), self.settings, hvdcompress.__version__)
        )
        return f"{self.measure.__name__}-{hashed}"

    def given(self, **settings: Any) -> Unit:
        """Return the unit with further settings, which are labels, too."""
        return replace(self, settings=self.settings | settings, labels=self.labels | settings)


def measure(units: Sequence[Unit], folder: Path, jobs: int) -> list[list[dict[str, Any]]]:
    """Return the records of every unit, with its labels. Measure what the folder has no result of, equal units once.

    Args:
        units: those that are ``alone`` come last, one at a time.
        folder: keeps the results; made if it does not exist.
        jobs: how many units run side by side; one runs in this process.

    Raises:
        Stopped: Ctrl-C or SIGTERM; finished units are kept, as they are after any exception of a unit.
    """
    for threads in ("OMP_NUM_THREADS", "HVDCOMPRESS_THREADS"):
        os.environ.setdefault(threads, "1")  # one process per core, and times are those of one core
    folder.mkdir(parents=True, exist_ok=True)
    known, asked = _results(folder), {unit.key: unit for unit in units}
    missing = {key: unit for key, unit in asked.items() if key not in known}
    if len(missing) < len(asked):
        print(f"{len(asked) - len(missing)} of {len(asked)} results are kept from an earlier run", flush=True)
    began, done = time.perf_counter(), 0
    with stoppable():
        for alone in (False, True):
            calls = [joblib.delayed(_result)(key, unit) for key, unit in missing.items() if unit.alone == alone]
            parallel = joblib.Parallel(1 if alone else jobs, return_as="generator_unordered")
            for result in parallel(calls):
                results.append_line(folder / FILE, result)
                done += 1
                left = timedelta(seconds=round((time.perf_counter() - began) / done * (len(missing) - done)))
                print(f"[{done}/{len(missing)}] {missing[result['key']].name}, about {left} left", flush=True)
    known = _results(folder)
    return [[{**unit.labels, **row} for row in known[unit.key]["found"]] for unit in units]


def kept(folder: Path) -> pd.DataFrame:
    """Return the records of all units that :func:`measure` has kept in a folder.

    Raises:
        ValueError: there are none.
    """
    records = [{**result["labels"], **row} for result in _results(folder).values() for row in result["found"]]
    if not records:
        raise ValueError(f"no results in {folder}")
    return pd.DataFrame(records)


def _results(folder: Path) -> dict[str, dict[str, Any]]:
    return {result["key"]: result for result in results.read_lines(folder / FILE)}


def _result(key: str, unit: Unit) -> dict[str, Any]:
    """Measure a unit, in any process; return the line that keeps its result."""
    began = time.perf_counter()
    found = unit.measure(**unit.settings)
    rows = found if isinstance(found, list) else [found]
    seconds = round(time.perf_counter() - began, 2)
    return {"key": key, "labels": unit.labels, "settings": unit.settings, "seconds": seconds, "found": rows}
