"""Run by every rank of a launch: ``python -m tests.chaos.rank FOLDER``, with the case in FOLDER.

The rank that is the case's victim has the fault, which :class:`Injector` makes happen.

Each rank writes its process id, and at its end how the training ended (``rank-0.json``), what it gave and received
(``rank-0.npz``), and the same at every save (``sums/``). From this the judge computes what was lost.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hvdcompress import registry
from hvdcompress.method import AllGather
from tests.chaos.faults import INJECTED, SAVE_EVERY, SHAPES, STEPS, Case
from tests.chaos.files import write_arrays
from tests.ranks.drivers import driver_of

LEARNING_RATE = np.float32(0.1)
STEP_SECONDS = 0.02  #: approximate duration of a step: a signal comes up to so long after its beginning
Arrays = dict[str, np.ndarray]


class Injected(RuntimeError):
    """The exception of a fault."""


class Injector:
    """The fault of one case on one rank; on all ranks but the victim nothing happens.

    Args:
        case: the case.
        rank: this rank.
        folder: the launch's folder. ``fault.json`` there says when the fault came, and to which process.
    """

    def __init__(self, case: Case, rank: int, folder: Path):
        self.case = case
        self.folder = folder
        self.fault = case.fault if rank == case.victim else ""
        self._armed = False
        self._exchanges = 0  # in this step so far
        self._exchanges_before = 1  # in the step before
        if self.fault in ("compress", "decode", "garbage"):
            cls = registry.classes()[case.method]
            setattr(cls, "exchange", self._failing(cls.exchange))  # noqa: B010  (mypy: a method is assigned)

    def happens(self) -> None:
        """Write down that the fault comes now."""
        unfinished = self.folder / "fault.tmp"
        unfinished.write_text(json.dumps({"time": time.monotonic(), "pid": os.getpid()}), encoding="utf-8")
        unfinished.replace(self.folder / "fault.json")

    def before_training(self) -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
        """Return this rank's shapes, in its order, and its settings; a late rank sleeps here."""
        if self.fault in ("late", "order", "plan"):
            self.happens()
        if self.fault == "late":
            time.sleep(self.case.delay)
        settings = self.case.settings
        if self.fault == "plan":
            settings |= {"seed": 1} if self.case.method == "powersgd" else {"density": 0.06}
        return (dict(reversed(SHAPES.items())) if self.fault == "order" else SHAPES), settings

    def gradients(self, step: int, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the gradients of a step, possibly with a NaN."""
        if self.fault == "nan" and step == self.case.step:
            self.happens()
            array = list(given.values())[int(self.case.moment * len(given))]
            array.flat[int(self.case.moment * array.size)] = np.nan
        return given

    @contextlib.contextmanager
    def in_step(self, step: int) -> Iterator[None]:
        """Context manager for a step: if it is the step of the fault, the fault happens inside."""
        self._exchanges, self._exchanges_before = 0, max(self._exchanges, 1)
        self._armed = step == self.case.step
        with self._killing(self._armed and self.fault in ("killed", "paused")):
            yield
        self._armed = False

    @contextlib.contextmanager
    def in_save(self, step: int) -> Iterator[None]:
        """Context manager for a save: the first one from the fault's step on has the fault."""
        now = step >= self.case.step and not (self.folder / "fault.json").exists()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if now and self.fault == "disk":  # files that cannot grow behave like a disk that is full
            self.happens()
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(20_000 * self.case.moment), limits[1]))
        try:
            with self._killing(now and self.fault == "killed_saving"):
                yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    def optimizer(self) -> None:
        """Raise what an optimizer raises whose step fails."""
        if self.fault == "optimizer" and self._armed:
            self._raise()

    @contextlib.contextmanager
    def _killing(self, now: bool) -> Iterator[None]:
        """Context manager that kills or stops this process after some milliseconds, whatever it does then."""

        def send() -> None:
            self.happens()
            if self.fault == "paused":
                subprocess.Popen(["sh", "-c", f"sleep {self.case.delay}; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP if self.fault == "paused" else signal.SIGKILL)

        timer = threading.Timer(self.case.moment * STEP_SECONDS, send)
        if now:
            timer.start()
        yield
        if now:
            timer.join()  # a thread that waits for a core must not send the signal in a later step

    def _raise(self) -> None:
        self._armed = False
        self.happens()
        raise Injected(f"{INJECTED} in {self.fault}")

    def _failing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method's ``exchange`` that fails in one of the step's exchanges: before its collective, in the
        payload, or after it."""

        def exchange(method: Any, x: Any, state: Any, ctx: Any, work: Any) -> Any:
            mine = self._armed and self._exchanges >= int(self.case.moment * self._exchanges_before)
            self._exchanges += 1
            if mine and self.fault == "compress":
                self._raise()
            communication = original(method, x, state, ctx, work)
            result = None
            while True:
                try:
                    collective = communication.send(result)
                except StopIteration as stop:
                    return stop.value
                if mine and self._armed and self.fault == "garbage" and isinstance(collective, AllGather):
                    self._armed = False
                    self.happens()
                    collective = dataclasses.replace(collective, x=self._damaged(collective.x, work.ops))
                result = yield collective
                if mine and self._armed and self.fault == "decode":
                    self._raise()

        return exchange

    def _damaged(self, payload: Any, ops: Any) -> Any:
        """Return a copy of a payload with one byte of its header flipped; its length stays what it was."""
        damaged = np.array(payload)
        damaged[int(24 * self.case.moment)] ^= 0xFF
        return ops.asarray(damaged, like=payload)


def main(folder: Path) -> None:
    """Train, with the case's fault if this rank is the victim."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a file that cannot grow is then an error, as on a full disk
    faulthandler.register(signal.SIGUSR1)  # the launcher asks for stacks if the launch hangs
    case = Case(**json.loads((folder / "case.json").read_text(encoding="utf-8")))
    driver = driver_of(case.driver, folder)
    _write(folder, driver.rank)
    try:
        _train(case, driver, folder)
    except Exception as error:
        _write(folder, driver.rank, ended="error", error=f"{type(error).__name__}: {error}")
        raise


def _train(case: Case, driver: Any, folder: Path) -> None:
    injector = Injector(case, driver.rank, folder)
    shapes, settings = injector.before_training()
    handle = driver.make(case.method, settings, shapes)
    parameters: Arrays = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    given, received = ({name: np.zeros(shape) for name, shape in SHAPES.items()} for _ in range(2))
    done, failed = 0, -2
    for step in range(STEPS):
        gradients = injector.gradients(step, _gradients([case.seed, driver.rank, step], driver.rank, parameters))
        with injector.in_step(step):
            try:
                reduced = handle.reduce(gradients)
            except Exception as error:
                if not case.catches or type(error).__name__ == "PeerLost" or failed == step - 1:
                    raise  # after a second failure in a row, others would follow
                failed = step
                continue
            finite = [name for name, array in reduced.items() if np.isfinite(array).all()]
            if len(finite) < len(reduced) and not driver.by_tensor:
                continue  # skip the step, as a loss scaler does
            injector.optimizer()
            for name in finite:
                parameters[name] -= LEARNING_RATE * reduced[name]
        done += 1
        for name in finite:
            given[name] += gradients[name]
            received[name] += reduced[name]
        if step % SAVE_EVERY == SAVE_EVERY - 1:
            (folder / "sums").mkdir(exist_ok=True)
            write_arrays(folder / "sums" / f"{done}-{driver.rank}.npz", given=given, received=received)
            with injector.in_save(step):
                try:
                    handle.save(folder / "state")
                except OSError:
                    if not case.catches:
                        raise
    residuals = {name: handle.residual(name) for name in SHAPES}
    write_arrays(folder / f"rank-{driver.rank}.npz", given=given, received=received, residual=residuals)
    digest = hashlib.sha256(b"".join(parameters[name].tobytes() for name in SHAPES)).hexdigest()
    _write(folder, driver.rank, ended="done", done=done, digest=digest)


def _gradients(key: list[int], rank: int, parameters: Arrays) -> Arrays:
    """Return gradients towards a target of this rank's own, with noise: if ranks' parameters differ, they stay so."""
    rng = np.random.default_rng(key)
    drawn = {name: rng.standard_normal(parameters[name].shape) for name in SHAPES}
    return {name: (0.1 * (array - rank) + drawn[name]).astype(np.float32) for name, array in parameters.items()}


def _write(folder: Path, rank: int, **record: object) -> None:
    said = {"pid": os.getpid(), **record}
    (folder / f"rank-{rank}.json").write_text(json.dumps(said), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
