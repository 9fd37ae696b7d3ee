"""Units of work: calls of measuring functions that run side by side, and whose results are kept on disk.

Only the parent process writes results. (Two processes that start a ``joblib.Memory`` at the same moment may clear it.)
"""

from __future__ import annotations

import inspect
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import joblib

import hvdcompress
from experiments.report import numbers

__all__ = ["Unit", "measure"]


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
    def key(self) -> dict[str, Any]:
        """What the result depends on."""
        measure = f"{self.measure.__module__}.{self.measure.__name__}"
        source = inspect.getsource(self.measure)
        return {"measure": measure, "source": source, "settings": self.settings, "version": hvdcompress.__version__}

    def given(self, **settings: Any) -> Unit:
        """Return the unit with further settings, which are labels, too."""
        return replace(self, settings=self.settings | settings, labels=self.labels | settings)


def measure(units: Sequence[Unit], folder: Path, jobs: int) -> list[list[dict[str, Any]]]:
    """Return the records of every unit, with its labels. Measure what the folder has no result of, equal units once.

    Args:
        units: those that are ``alone`` come last, one at a time.
        folder: keeps the results.
        jobs: how many units run side by side; one runs in this process.

    Raises:
        KeyboardInterrupt: the user pressed Ctrl-C; finished units are kept.
    """
    for threads in ("OMP_NUM_THREADS", "HVDCOMPRESS_THREADS"):
        os.environ.setdefault(threads, "1")  # one process per core, and times are those of one core
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{unit.measure.__name__}-{joblib.hash(unit.key)}.json" for unit in units]
    missing = {file: unit for file, unit in zip(files, units, strict=True) if not file.exists()}
    if kept := len(set(files)) - len(missing):
        print(f"{kept} of {len(set(files))} results are kept from an earlier run", flush=True)
    began, done = time.perf_counter(), 0
    for alone in (False, True):
        calls = [joblib.delayed(_found)(file, unit) for file, unit in missing.items() if unit.alone == alone]
        parallel = joblib.Parallel(1 if alone else jobs, return_as="generator_unordered")
        for file, record in parallel(calls):
            half = file.with_suffix(".half")  # a result is there whole or not at all
            half.write_text(json.dumps(record) + "\n", encoding="utf-8")
            half.replace(file)
            done += 1
            remaining = numbers.clock((time.perf_counter() - began) / done * (len(missing) - done))
            print(f"[{done}/{len(missing)}] {record['name']}, about {remaining} left", flush=True)
    found = [json.loads(file.read_text(encoding="utf-8"))["found"] for file in files]
    records = [each if isinstance(each, list) else [each] for each in found]
    return [[{**unit.labels, **row} for row in rows] for unit, rows in zip(units, records, strict=True)]


def _found(file: Path, unit: Unit) -> tuple[Path, dict[str, Any]]:
    """Return the file that keeps a unit's result, and what it says."""
    began = time.perf_counter()
    found = unit.measure(**unit.settings)
    seconds = round(time.perf_counter() - began, 2)
    return file, {"name": unit.name, "settings": unit.settings, "seconds": seconds, "found": found}
