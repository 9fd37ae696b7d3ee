"""Measure what a paper's claims need, a unit after another or several side by side, and write the paper's page."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.report import numbers
from experiments.reproduce import cache, page
from experiments.reproduce.claims import Claim, Paper, Result, Scale, Unit
from experiments.training.tasks import TASKS

CACHE = "cache"  #: the folder of results in a paper's folder


def check(paper: Paper, scale: Scale) -> None:
    """Refuse to begin where a task's data is not there.

    Raises:
        ValueError: it is not; the message says what brings it.
    """
    for task in paper.tasks:
        if problem := TASKS[task].missing():
            raise ValueError(problem)


def reproduce(
    paper: Paper,
    folder: Path,
    scale: Scale,
    jobs: int,
    console: Console,
    command: str,
    claims: Sequence[Claim] | None = None,
) -> list[Path]:
    """Measure what is not yet measured, and write the page.

    Args:
        paper: the paper.
        folder: for the page; results are kept in it.
        scale: how much is measured.
        jobs: units side by side; with 1 they run in this process.
        console: for progress.
        command: the command line, which the page shows.
        claims: only these of the paper; the page's other parts stay as they are.

    Returns:
        The files that were written.

    Raises:
        KeyboardInterrupt: the user pressed Ctrl-C; what was measured is kept.
    """
    needed = {claim.id: claim.needed(scale) for claim in claims or paper.claims}
    every = [unit for groups in needed.values() for units in groups for unit in units]
    found = measure(every, folder / CACHE, jobs, console)

    def results(units: Sequence[Unit]) -> list[Result]:
        return [Result(unit, found[cache.file_of(folder, unit).name]) for unit in units]

    reports = [(claim, claim.reported(list(map(results, needed[claim.id])))) for claim in claims or paper.claims]
    return page.write(paper, reports, folder, command, scale)


def measure(units: Iterable[Unit], folder: Path, jobs: int, console: Console) -> dict[str, dict[str, Any]]:
    """What every unit finds, by the name of the file that keeps it.

    A unit that several claims ask for is measured once. Those that must be alone come last, one at a time.
    """
    for threads in ("OMP_NUM_THREADS", "HVDCOMPRESS_THREADS"):
        os.environ.setdefault(threads, "1")  # a process a core: units run side by side, and times are of one core
    different = {cache.file_of(folder, unit).name: unit for unit in units}
    found = {name: kept for name, unit in different.items() if (kept := cache.load(folder, unit)) is not None}
    missing = [unit for name, unit in different.items() if name not in found]
    progress = Progress(missing, len(found), max(1, jobs), console)
    together = [unit for unit in missing if not unit.alone] if jobs > 1 else []
    rest = [unit for unit in missing if unit not in together]
    with _stopped_at_the_end():
        _side_by_side(together, folder, jobs, progress)
        _in_turn(rest, folder, progress)
    for name, unit in different.items():
        if name not in found:
            kept = cache.load(folder, unit)
            assert kept is not None, name
            found[name] = kept
    return found


def carry_out(unit: Unit, folder: Path) -> float:
    """Measure one unit and keep what it finds; returns the seconds that it took."""
    began = time.perf_counter()
    found = unit.measure(**unit.settings)
    seconds = time.perf_counter() - began
    cache.save(folder, unit, found, seconds)
    return seconds


def _in_turn(units: Sequence[Unit], folder: Path, progress: Progress) -> None:
    for unit in units:
        progress.begins(unit)
        progress.done(unit, carry_out(unit, folder))


def _side_by_side(units: Sequence[Unit], folder: Path, jobs: int, progress: Progress) -> None:
    if not units:
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(units)), context, initializer=_leave_ctrl_c) as pool:
        futures: dict[Future[float], Unit] = {pool.submit(carry_out, unit, folder): unit for unit in units}
        try:
            for future in as_completed(futures):
                progress.done(futures[future], future.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def _leave_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers itself


@contextlib.contextmanager
def _stopped_at_the_end() -> Iterator[None]:
    """An end by a signal is as a Ctrl-C: workers are ended, too."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Progress:
    """A line a unit: how many are done, what it took, and about how much time is left."""

    def __init__(self, units: Sequence[Unit], kept: int, jobs: int, console: Console):
        self.left, self.total, self.jobs, self.console = list(units), len(units), jobs, console
        self.guessed = self.took = 0.0
        if kept:
            console.print(f"{kept} of {kept + len(units)} results are kept from an earlier run", highlight=False)

    def begins(self, unit: Unit) -> None:
        """Say that a unit begins."""
        self.console.print(f"[dim]{unit.name} …[/]", highlight=False)

    def done(self, unit: Unit, seconds: float) -> None:
        """Say that a unit is done; its time corrects the guesses for those that are left."""
        self.left.remove(unit)
        self.guessed += unit.seconds
        self.took += seconds
        self.console.print(
            f"[{self.total - len(self.left)}/{self.total}] {unit.name}: {numbers.seconds_of(seconds)}, "
            f"about {numbers.clock(self.remaining())} left",
            highlight=False,
            markup=False,
        )

    def remaining(self) -> float:
        """Seconds until all is measured, about: by the guesses, scaled by how wrong they were so far."""
        factor = self.took / self.guessed if self.guessed else 1.0
        alone = sum(unit.seconds for unit in self.left if unit.alone)
        together = sum(unit.seconds for unit in self.left if not unit.alone)
        return factor * (alone + together / self.jobs)
