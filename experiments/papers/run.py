"""Measure what a paper's claims need, several units side by side, and write the results and the page.

Each unit's result is kept in a JSON file, so that an interrupted command goes on. Only the parent process writes: two
processes that begin a ``joblib.Memory`` at the same moment may clear it.
"""

from __future__ import annotations

import inspect
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import joblib
import pandas as pd

import hvdcompress
from experiments.papers.claims import Paper, Record, Scale, Unit
from experiments.papers.page import page
from experiments.report import numbers, plots, results


def reproduce(paper: Paper, folder: Path, scale: Scale, jobs: int, only: Sequence[str] = ()) -> list[Record]:
    """Measure what is not yet measured; write ``papers-PAPER.json``, pictures and ``PAPER.md``.

    Args:
        paper: the paper.
        folder: for what is written; each unit's result is kept in its folder ``cache``.
        scale: how much is measured.
        jobs: how many units run side by side.
        only: ids of claims. The other claims of a ``papers-PAPER.json`` in the folder stay as they are.

    Returns:
        One record per verdict.

    Raises:
        KeyboardInterrupt: the user pressed Ctrl-C; finished units are kept.
        ValueError: there is no such claim.
    """
    needed = [(claim, how, sets) for claim in paper.named(only) for how, sets in claim.needed(scale).items()]
    found = measure([unit for _, _, sets in needed for units in sets for unit in units], folder / "cache", jobs)
    about = results.about()
    made = {"command": about["command"], "date": about["date"], "cpu": about["machine"]["cpu"]}
    records = []
    for claim, how, sets in needed:
        verdict = claim.test(*(frame_of(units, [found[_key(unit)] for unit in units]) for units in sets))
        picture = f"{paper.id}-{claim.id}{'-adapted' if how == 'adapt' else ''}.svg" if verdict.figure else ""
        if verdict.figure:
            plots.save(verdict.figure, folder / picture)
        records.append(claim.record(verdict, momentum=how, picture=picture, seeds=scale.seeds, **made))
    file, measured = folder / f"papers-{paper.id}.json", {record["claim"] for record in records}
    earlier = json.loads(file.read_text(encoding="utf-8"))["records"] if only and file.exists() else []
    every = [record for record in earlier if record["claim"] not in measured] + records
    every.sort(key=lambda record: [claim.id for claim in paper.claims].index(record["claim"]))
    head = {name: getattr(paper, name) for name in ("title", "source", "holds", "fails")}
    results.save(file.stem, pd.DataFrame(every, dtype=object), folder, paper=paper.id, **head)  # counts stay integers
    text = page(json.loads(file.read_text(encoding="utf-8")))
    (folder / f"{paper.id}.md").write_text(text, encoding="utf-8")
    return records


def frame_of(units: Sequence[Unit], found: Sequence[Any]) -> pd.DataFrame:
    """Return the records of all units, with the units' labels as columns."""
    each = [(unit, result if isinstance(result, list) else [result]) for unit, result in zip(units, found, strict=True)]
    return pd.DataFrame([{**unit.labels, **record} for unit, records in each for record in records])


def measure(units: Iterable[Unit], folder: Path, jobs: int) -> dict[str, Any]:
    """Return what every unit finds, by its key. Equal units are measured once, those that measure time by themselves.

    Raises:
        KeyboardInterrupt: the user pressed Ctrl-C; finished units are kept in the folder.
    """
    for threads in ("OMP_NUM_THREADS", "HVDCOMPRESS_THREADS"):
        os.environ.setdefault(threads, "1")  # one process per core, and times are those of one core
    folder.mkdir(parents=True, exist_ok=True)
    different = {_key(unit): unit for unit in units}
    files = {key: folder / f"{unit.measure.__name__}-{key}.json" for key, unit in different.items()}
    missing = {key: unit for key, unit in different.items() if not files[key].exists()}
    if len(missing) < len(different):
        print(f"{len(different) - len(missing)} of {len(different)} results are kept from an earlier run", flush=True)
    began, guessed, done = time.perf_counter(), 0.0, 0
    left = sum(unit.seconds for unit in missing.values())
    for alone in (False, True):
        some = {key: unit for key, unit in missing.items() if unit.alone == alone}
        with _processes(1 if alone else min(jobs, len(some))) as pool:
            futures = {pool.submit(_timed, unit): key for key, unit in some.items()}
            for future in as_completed(futures):
                key, (found, seconds) = futures[future], future.result()
                unit = different[key]
                record = {"name": unit.name, "settings": unit.settings, "seconds": round(seconds, 2), "found": found}
                half = files[key].with_suffix(".half")  # a result is there whole or not at all
                half.write_text(json.dumps(record) + "\n", encoding="utf-8")
                half.replace(files[key])
                done, guessed, left = done + 1, guessed + unit.seconds, left - unit.seconds
                remaining = numbers.clock((time.perf_counter() - began) / guessed * left)
                print(f"[{done}/{len(missing)}] {unit.name}, about {remaining} left", flush=True)
    return {key: json.loads(file.read_text(encoding="utf-8"))["found"] for key, file in files.items()}


def _key(unit: Unit) -> str:
    """Return a hash of all that a result depends on: another version of the measure's module has another one."""
    source = inspect.getsource(sys.modules[unit.measure.__module__])
    return str(joblib.hash([unit.measure.__qualname__, source, unit.settings, hvdcompress.__version__]))


def _timed(unit: Unit) -> tuple[Any, float]:
    began = time.perf_counter()
    found = unit.measure(**unit.settings)
    return found, time.perf_counter() - began


@contextmanager
def _processes(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Context manager for worker processes, which it ends at once if this process is interrupted or asked to end."""
    pool = ProcessPoolExecutor(max(1, jobs), multiprocessing.get_context("spawn"), initializer=_leave_ctrl_c)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    pool.shutdown()


def _leave_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
