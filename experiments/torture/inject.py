"""Make the fault of a case happen, on the rank that is to have it."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from experiments.torture.faults import INJECTED, Case
from experiments.torture.trainings import SHAPES, Arrays, Shapes, Training
from hvdcompress import registry

__all__ = ["Injected", "Injector"]

STEP_SECONDS = 0.02  #: a step's, about: signals come up to so much after its beginning


class Injected(RuntimeError):
    """The exception of a fault."""


class Injector:
    """The fault of one case on one rank; on all ranks but the victim nothing happens.

    Args:
        case: the case.
        rank: this rank.
        folder: the launch's; ``fault.json`` says there when the fault came, and to which process.
    """

    def __init__(self, case: Case, rank: int, folder: Path):
        self.case, self.folder = case, folder
        self.fault = case.fault if rank == case.victim else ""
        self._armed, self._calls, self._in_step = False, 0, 1
        self._at = 0  # the step that is on
        self._signals: tuple[int, threading.Thread] | None = None  # since which step, and what sends the signal

    def happens(self) -> None:
        """Write down that the fault comes now."""
        unfinished = self.folder / "fault.tmp"
        unfinished.write_text(json.dumps({"time": time.monotonic(), "pid": os.getpid()}), encoding="utf-8")
        unfinished.replace(self.folder / "fault.json")

    # -- before the training --------------------------------------------------------------------------------

    def start(self) -> None:
        """Come late, perhaps."""
        if self.fault == "late":
            self.happens()
            time.sleep(self.case.seconds)

    def shapes(self) -> Shapes:
        """The parameters, in this rank's order."""
        if self.fault != "order":
            return SHAPES
        self.happens()
        return {name: SHAPES[name] for name in reversed(list(SHAPES))}

    def settings(self) -> dict[str, Any]:
        """The Compressor's settings on this rank."""
        given = self.case.settings
        if self.fault != "plan":
            return given
        self.happens()
        return {**given, "seed": 1} if self.case.method == "powersgd" else {**given, "density": 0.06}

    def prepare(self, training: Training) -> None:
        """Put the exception where it is to be raised."""
        if self.fault in ("compress", "decode"):
            cls = registry.classes()[self.case.method]
            setattr(cls, "exchange", self._raising(cls.exchange))  # noqa: B010  (mypy: a method is assigned)
        if self.fault == "optimizer":
            cls, original = training.optimizer_class(), training.optimizer_class().step  # type: ignore[attr-defined]

            def step(optimizer: Any, *given: Any, **more: Any) -> Any:
                if self._armed:
                    self._raise()
                return original(optimizer, *given, **more)

            setattr(cls, "step", step)  # noqa: B010

    # -- in a step ------------------------------------------------------------------------------------------

    def gradients(self, step: int, given: Arrays) -> Arrays:
        """The gradients of a step, with a NaN perhaps."""
        if self.fault == "nan" and step == self.case.step:
            self.happens()
            array = list(given.values())[int(self.case.moment * len(given))]
            array.flat[int(self.case.moment * array.size)] = np.nan
        return given

    @contextlib.contextmanager
    def in_step(self, step: int) -> Iterator[None]:
        """Inside, the step of the fault has it."""
        if self._signals and step > self._signals[0] + 1:  # however late its thread is, it is not after the last step
            self._signals[1].join()
        self._in_step, self._calls, self._at = max(self._calls, 1), 0, step
        self._armed = step == self.case.step
        if self._armed and self.fault == "killed":
            self._signal(signal.SIGKILL)
        if self._armed and self.fault == "paused":
            self._signal(signal.SIGSTOP)
        yield
        self._armed = False

    @contextlib.contextmanager
    def in_save(self, step: int) -> Iterator[None]:
        """Inside, a save; the first one from the fault's step on has it."""
        now = step >= self.case.step and not (self.folder / "fault.json").exists()
        if now and self.fault == "killed_saving":
            self._signal(signal.SIGKILL)
        if not (now and self.fault == "disk"):
            yield
            return
        self.happens()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(20_000 * self.case.moment), limits[1]))  # as a disk that fills
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    def _signal(self, number: signal.Signals) -> None:
        """Send this process a signal, a part of a step later, whatever it does then."""

        def send() -> None:
            self.happens()
            os.kill(os.getpid(), number)

        self._signals = self._at, threading.Timer(self.case.moment * STEP_SECONDS, send)
        self._signals[1].start()

    def _raise(self) -> None:
        self._armed = False
        self.happens()
        raise Injected(f"{INJECTED} in {self.fault}")

    def _raising(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A method's ``exchange`` that raises in one of the step's exchanges, before its collective or after it."""

        def exchange(method: Any, *given: Any, **more: Any) -> Any:
            mine = self._armed and self._calls >= int(self.case.moment * self._in_step)
            self._calls += 1
            if mine and self.fault == "compress":
                self._raise()
            communication = original(method, *given, **more)
            result = None
            while True:
                try:
                    collective = communication.send(result)
                except StopIteration as stop:
                    return stop.value
                result = yield collective
                if mine and self._armed:
                    self._raise()

        return exchange
