"""Units of work: calls of measuring functions that run side by side, and whose results are kept on disk.

Only the parent process writes results. (Two processes that start a ``joblib.Memory`` at the same moment may clear it.)
"""

from __future__ import annotations

import inspect
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import joblib

import hvdcompress
from experiments.report import numbers

__all__ = ["Unit", "file_of", "measure"]


@dataclass(frozen=True)
class Unit:
    """One call of a measure.

    Args:
        measure: a function at the top of a module, so that another process can import it. It returns plain data.
        settings: its keywords, plain data.
        labels: what tells its result from those of other units, such as the net and the seed.
        seconds: roughly how long it takes on one core. Only the ratios between units count, for the time left.
        alone: it measures time, so nothing else may run meanwhile.
    """

    measure: Callable[..., Any]
    settings: dict[str, Any]
    labels: dict[str, Any]
    seconds: float = 1.0
    alone: bool = False

    @property
    def name(self) -> str:
        """The measure and the labels, in words."""
        labels = (value if name == "net" else f"{name} {value}" for name, value in self.labels.items() if value != "")
        return " ".join([self.measure.__name__, *map(str, labels)])


def file_of(folder: Path, unit: Unit) -> Path:
    """Return the file that keeps a unit's result: by its measure's source, its settings and the package's version."""
    return folder / f"{unit.measure.__name__}-{joblib.hash([_key(unit), inspect.getsource(unit.measure)])}.json"


def _key(unit: Unit) -> dict[str, Any]:
    measure = f"{unit.measure.__module__}.{unit.measure.__name__}"
    return {"measure": measure, "settings": unit.settings, "version": hvdcompress.__version__}


def measure(units: Sequence[Unit], folder: Path, jobs: int) -> list[Any]:
    """Return what every unit finds. Measure those that the folder has no result of, equal ones once.

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
    different = {file_of(folder, unit): unit for unit in units}
    missing = {file: unit for file, unit in different.items() if not file.exists()}
    if len(missing) < len(different):
        print(f"{len(different) - len(missing)} of {len(different)} results are kept from an earlier run", flush=True)
    began, guessed, done = time.perf_counter(), 0.0, 0
    left = sum(unit.seconds for unit in missing.values())
    for alone in (False, True):
        some = {file: unit for file, unit in missing.items() if unit.alone == alone}
        with closing(_results(some, 1 if alone else min(jobs, len(some)))) as results:
            for file, found, seconds in results:
                unit = missing[file]
                record = {"name": unit.name, "key": _key(unit), "seconds": round(seconds, 2), "found": found}
                half = file.with_suffix(".half")  # a result is there whole or not at all
                half.write_text(json.dumps(record) + "\n", encoding="utf-8")
                half.replace(file)
                done, guessed, left = done + 1, guessed + unit.seconds, left - unit.seconds
                remaining = numbers.clock((time.perf_counter() - began) / guessed * left)
                print(f"[{done}/{len(missing)}] {unit.name}, about {remaining} left", flush=True)
    return [json.loads(file_of(folder, unit).read_text(encoding="utf-8"))["found"] for unit in units]


def _results(units: dict[Path, Unit], jobs: int) -> Generator[tuple[Path, Any, float], None, None]:
    """Run units; yield each with its result and seconds as it ends. End all processes when interrupted or closed."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    pool = None
    try:
        if jobs <= 1:
            for file, unit in units.items():
                yield file, *_timed(unit)
            return
        pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=_leave_ctrl_c)
        futures = {pool.submit(_timed, unit): file for file, unit in units.items()}
        for future in as_completed(futures):
            yield futures[future], *future.result()
        pool.shutdown()
    except BaseException:
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _timed(unit: Unit) -> tuple[Any, float]:
    began = time.perf_counter()
    found = unit.measure(**unit.settings)
    return found, time.perf_counter() - began


def _leave_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
